"""What one claim has to publish: its tokens and texts, and the next entry of its log.

Knows no other claim, no lock and no Redis. It keeps all tokens and texts of its request, published
ones too: when Redis loses the tail of a log, any suffix can be sent again.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from engine.logprobs import Logprobs
from engine.request import Request
from quire.errors import ProtocolError
from quire.transitions.values import Claim, CommitItem
from quire.wire.logprobs import TokenLogprob
from quire.wire.protocol import Completion, ErrorInfo, TokenChunk
from service.outgoing.completions import Origin

#: Most tokens of one entry, and most characters of its text, though the text of one token is never
#: split. Whatever the ids are, that is far below the largest message that is read, and a commit of
#: all the claims that one takes stays below some tens of megabytes.
MAX_TOKENS_PER_ENTRY = 4096
MAX_TEXT_PER_ENTRY = 1 << 16
#: Most tokens of one entry with log-probabilities: with 21 of them and a text for each, these take
#: a tenth of the largest message that is read.
MAX_TOKENS_WITH_LOGPROBS = 256

#: Turns the engine's log-probabilities of a token into the protocol's; see
#: `ModelTokenizer.with_texts`.
WireLogprob = Callable[[int, Logprobs], TokenLogprob]


@dataclass(slots=True, eq=False)
class Delivery:
    """What one claim has to publish. Once it is open, only the Outbox changes it, under its lock.

    The exceptions are `last_token_time`, and `origin` and `request`, which intake sets before the
    engine has the request.

    `key` names the claim inside this worker, and is the engine's request id: a request that was
    lost and claimed again must not receive the outputs of its former claim.
    """

    key: str
    claim: Claim
    origin: Origin
    #: The shard of the queue that the claim is of.
    shard: int = 0
    token_ids: list[int] = field(default_factory=list)
    #: The text that became certain with each token.
    texts: list[str] = field(default_factory=list)
    #: Log-probabilities of each token; empty where the request did not ask.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    #: Makes them from the engine's; None where the engine gives none.
    wire_logprob: WireLogprob | None = None
    #: Text that became certain without a token, when the request was cut short.
    tail: str = ""
    #: Tokens known to be in the log.
    published: int = 0
    completion: Completion | None = None
    is_released: bool = False
    #: Why it is given back, if that counts as an attempt.
    setback: ErrorInfo | None = None
    #: What the engine was given; None for a request that never got there.
    request: Request | None = None
    #: When each token not yet accounted for left the engine.
    token_times: list[float] = field(default_factory=list)
    #: The latest of those accounted for. Only the publisher touches it.
    last_token_time: float | None = None

    @property
    def is_ended(self) -> bool:
        """The engine is through with it."""
        return self.completion is not None or self.is_released

    @property
    def num_unpublished(self) -> int:
        return len(self.token_ids) - self.published

    @property
    def is_suspect(self) -> bool:
        """It has run and generated nothing new: it may be what made the device fail."""
        has_run = self.request is not None and self.request.times.first_scheduled is not None
        return has_run and len(self.token_ids) == self.origin.num_resumed_tokens

    @property
    def is_on_trial(self) -> bool:
        """Earlier claims died with their workers, and this one has not published enough yet.

        The request may be what killed those workers.
        """
        origin = self.origin
        if origin.trial_tokens == 0 or self.is_ended:
            return False
        return self.published < origin.num_resumed_tokens + origin.trial_tokens

    def recall(self, published: Sequence[TokenChunk]) -> None:
        """Take over what earlier claims have published. ProtocolError for a log with a gap."""
        for chunk in published:
            if chunk.start != len(self.token_ids):
                raise ProtocolError(
                    f"the log goes on at token {chunk.start} after {len(self.token_ids)} tokens"
                )
            ends = chunk.text_ends or (0,) * (len(chunk.token_ids) - 1) + (len(chunk.text),)
            starts = (0, *ends[:-1])
            self.token_ids += chunk.token_ids
            self.logprobs += chunk.logprobs
            self.texts += [chunk.text[start:end] for start, end in zip(starts, ends, strict=True)]
        self.published = len(self.token_ids)

    def append(
        self, token_ids: Sequence[int], text: str, logprobs: Sequence[Logprobs] = ()
    ) -> None:
        """Add tokens; the text of several belongs to the last of them."""
        self.token_ids += token_ids
        if logprobs:
            assert self.wire_logprob is not None, "a request that asks for log-probabilities has it"
            self.logprobs += map(self.wire_logprob, token_ids, logprobs)
        if token_ids:
            self.texts += [""] * (len(token_ids) - 1)
            self.texts.append(text)
        else:
            self.tail += text

    def item(self) -> CommitItem | None:
        """What there is to commit now; None when all is in the log."""
        # It may be negative: a log that others wrote to can be ahead of this engine.
        if self.completion is None and self.num_unpublished <= 0:
            return None
        # A log has them for all of its tokens or for none, whichever worker began it.
        logprobs = self.logprobs if len(self.logprobs) == len(self.token_ids) else []
        most = MAX_TOKENS_WITH_LOGPROBS if logprobs else MAX_TOKENS_PER_ENTRY
        texts, text_ends = self._texts(most)
        end, completion = self.published + len(texts), self.completion
        if end < len(self.token_ids):
            # The rest, and the end, become due again once this part is settled.
            completion = None
        elif texts:
            texts[-1] += self.tail
            text_ends[-1] += len(self.tail)
        elif completion is not None and self.tail:
            # Text that was held back, and is certain only since the request was cut short.
            completion = replace(completion, tail=self.tail)
        return CommitItem(
            claim=self.claim,
            start=self.published,
            token_ids=tuple(self.token_ids[self.published : end]),
            text="".join(texts),
            completion=completion,
            text_ends=tuple(text_ends),
            logprobs=tuple(logprobs[self.published : end]),
            fingerprint=self._first_fingerprint() if self.published == 0 else "",
        )

    def _first_fingerprint(self) -> str:
        """The fingerprint of what generated the first tokens, which are committed now.

        CLAIM has recorded that of the first claim, which leaves out the adapter and may have
        generated nothing. Where Redis lost a log that another engine began, it is that engine's.
        """
        return self.origin.other_fingerprint or self.origin.fingerprint

    def _texts(self, most: int) -> tuple[list[str], list[int]]:
        """The texts of the next tokens that fit one entry, at most `most`, and where each ends."""
        texts = self.texts[self.published : self.published + most]
        ends = list(accumulate(map(len, texts)))
        # The text of one token is never split, however long it is.
        fitting = max(1, bisect_right(ends, MAX_TEXT_PER_ENTRY))
        return texts[:fitting], ends[:fitting]
