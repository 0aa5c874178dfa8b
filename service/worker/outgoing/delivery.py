"""The output of one claim: its tokens and texts, and the next entry of its log.

Knows no other claim, no lock and no Redis. It keeps all tokens and texts of its request, also the
published ones: when Redis loses the tail of a log, any suffix can be sent again.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

from engine.logprobs import Logprobs
from engine.port import RequestOutput
from engine.request import Request
from quire.errors import InvalidRequest, ProtocolError
from quire.queue.publish.commit import CommitItem, CommitReply, CommitStatus
from quire.queue.request.claims import Claim
from quire.records import PromptToken
from quire.wire.codec import MAX_MESSAGE_BYTES
from quire.wire.logprobs import TokenLogprob, ToldPrompt, TopLogprob
from quire.wire.protocol import Activity, Completion, ErrorInfo, TokenChunk, Usage
from service.worker.outgoing.completions import Origin, rejection

#: The most tokens of one entry, and the most characters of its text; the text of one token is never
#: split. With any ids an entry is far smaller than the largest message that readers accept, and a
#: commit of MAX_COMMIT_ITEMS entries stays below some tens of megabytes.
MAX_TOKENS_PER_ENTRY = 4096
MAX_TEXT_PER_ENTRY = 1 << 16
#: The most tokens of one entry with log-probabilities: with 21 of them and a text for each, the
#: entry has a tenth of the size of the largest message that readers accept.
MAX_TOKENS_WITH_LOGPROBS = 256
#: The most tokens of the entry that also has the prompt's, and the most bytes that these may take
#: in it: the texts of some tokens have hundreds.
MAX_TOKENS_WITH_PROMPT = 32
MAX_PROMPT_BYTES = MAX_MESSAGE_BYTES - (1 << 17)
#: The bytes of a record beside its text: id, number, and the length of a short text. Longer texts
#: take one or two more, for which MAX_PROMPT_BYTES leaves room.
_RECORD_BYTES = 15

#: Turns the engine's log-probabilities of a token into the protocol's; see
#: `ModelTokenizer.with_texts`.
WireLogprob = Callable[[int, Logprobs], TokenLogprob]


@dataclass(slots=True, eq=False)
class Delivery:
    """The output of one claim. While it is open, only the Outbox changes it, under its lock.

    The exceptions are `last_token_time`, and `origin`, `request` and `told_prompt`, which intake
    sets before the engine has the request.

    `key` identifies the claim inside this worker and is the engine's request id. It differs for
    each claim, so that a request that was lost and claimed again never receives outputs of the
    earlier claim.
    """

    key: str
    claim: Claim
    origin: Origin
    #: The number of the place that the claim is from.
    place: int = 0
    #: The request's rank in the queue when it was claimed; see Candidate.
    rank: int = 0
    token_ids: list[int] = field(default_factory=list)
    #: The text that each token added.
    texts: list[str] = field(default_factory=list)
    #: Log-probabilities of each token; empty if the request does not have `logprobs`.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    #: What the log tells of the prompt; it is published with the first token.
    told_prompt: ToldPrompt = ()
    #: Converts the engine's log-probabilities; None if the engine returns none.
    wire_logprob: WireLogprob | None = None
    #: Text without a token of its own: it was held back until the request ended early.
    tail: str = ""
    #: The number of tokens that are known to be in the log.
    published: int = 0
    completion: Completion | None = None
    is_released: bool = False
    #: The error, if its release counts as a failed attempt.
    failure: ErrorInfo | None = None
    #: The engine's request; None until the engine gets it.
    request: Request | None = None
    #: What the request does, and what of it Redis knows; Redis takes WAITING for granted.
    activity: Activity = Activity.WAITING
    told_activity: Activity = Activity.WAITING
    #: Times at which tokens left the engine; the publisher has not observed them yet.
    token_times: list[float] = field(default_factory=list)
    #: The last time that was observed. Only the publisher uses it.
    last_token_time: float | None = None

    @property
    def is_ended(self) -> bool:
        """The engine produces nothing more for it."""
        return self.completion is not None or self.is_released

    @property
    def num_unpublished(self) -> int:
        return len(self.token_ids) - self.published

    @property
    def has_news(self) -> bool:
        """Redis does not know yet what the request does."""
        return self.activity is not self.told_activity and not self.is_ended

    @property
    def shown_activity(self) -> Activity:
        """The activity; not every engine tells more than tokens."""
        has_new_tokens = len(self.token_ids) > self.origin.num_resumed_tokens
        is_told = self.activity is not Activity.WAITING or not has_new_tokens
        return self.activity if is_told else Activity.DECODING

    @property
    def is_suspect(self) -> bool:
        """Whether the request has run in a step and generated nothing new.

        Such a request may have made the device fail.
        """
        has_run = self.request is not None and self.request.times.first_scheduled is not None
        return has_run and len(self.token_ids) == self.origin.num_resumed_tokens

    @property
    def is_on_trial(self) -> bool:
        """Workers of earlier claims died, and this claim has not published `trial_tokens` yet.

        The request may have killed those workers.
        """
        origin = self.origin
        if origin.trial_tokens == 0 or self.is_ended:
            return False
        return self.published < origin.num_resumed_tokens + origin.trial_tokens

    def recall(self, published: Sequence[TokenChunk]) -> None:
        """Load the output of earlier claims from the log. ProtocolError for a log with a gap."""
        for chunk in published:
            if chunk.start != len(self.token_ids):
                raise ProtocolError(
                    f"the log continues at token {chunk.start} after {len(self.token_ids)} tokens"
                )
            ends = chunk.text_ends or (0,) * (len(chunk.token_ids) - 1) + (len(chunk.text),)
            starts = (0, *ends[:-1])
            self.token_ids += chunk.token_ids
            self.logprobs += chunk.logprobs
            self.told_prompt = self.told_prompt or chunk.told_prompt
            self.texts += [chunk.text[start:end] for start, end in zip(starts, ends, strict=True)]
        self.published = len(self.token_ids)

    def append(
        self, token_ids: Sequence[int], text: str, logprobs: Sequence[Logprobs] = ()
    ) -> None:
        """Add tokens. The whole text is stored with the last of them."""
        self.token_ids += token_ids
        if logprobs:
            assert self.wire_logprob is not None, "set if the request has logprobs"
            self.logprobs += map(self.wire_logprob, token_ids, logprobs)
        if token_ids:
            self.texts += [""] * (len(token_ids) - 1)
            self.texts.append(text)
        else:
            self.tail += text

    def tell_prompt(self, first_output: RequestOutput) -> None:
        """Add the log-probabilities of a prompt, which are with the first token if there is one.

        Raises:
            InvalidRequest: their texts are too long for an entry that readers accept.
        """
        if not first_output.token_ids:
            return
        assert self.wire_logprob is not None, "set if the request has logprobs"
        token_ids, logprobs = first_output.request.prompt_token_ids, first_output.prompt_logprobs
        assert not self.told_prompt and len(logprobs) == len(token_ids) - 1
        told = list(map(self.wire_logprob, token_ids, (Logprobs(0.0), *logprobs)))
        first = PromptToken(token_ids[0], None, told[0].text, raw=told[0].raw)
        others = (
            PromptToken(one.token_id, one.logprob, one.text, one.top, one.raw) for one in told[1:]
        )
        self.told_prompt = (first, *others)
        if (num_bytes := _num_bytes(told)) > MAX_PROMPT_BYTES:
            message = (
                f"with their texts, the log-probabilities of the prompt take {num_bytes} bytes; at "
                f"most {MAX_PROMPT_BYTES} are allowed: ask for fewer, or send a shorter prompt"
            )
            raise InvalidRequest("body.prompt_logprobs", message)

    def refuse(self, error: InvalidRequest) -> None:
        """End a claim whose first tokens cannot be published; they are dropped.

        The usage has its prompt, which was computed.
        """
        assert self.published == 0, "what is published stays"
        self.token_ids, self.texts, self.logprobs = [], [], []
        self.told_prompt, self.tail = (), ""
        self.completion = rejection(self.origin, error=error)
        if self.request is not None:
            usage = Usage(self.request.num_prompt_tokens, 0, self.request.num_cached_tokens)
            self.completion = replace(self.completion, usage=usage)

    @property
    def sends_prompt(self) -> bool:
        """Whether the next entry tells of the prompt."""
        return bool(self.told_prompt) and self.published == 0

    def item(self) -> CommitItem | None:
        """The next item to commit; None if everything is in the log."""
        # Negative if another worker has written to the log, so that it is ahead of this engine.
        if self.completion is None and self.num_unpublished <= 0 and not self.has_news:
            return None
        # A log has log-probabilities for all of its tokens or for none, also after a takeover.
        logprobs = self.logprobs if len(self.logprobs) == len(self.token_ids) else []
        max_tokens = MAX_TOKENS_WITH_LOGPROBS if logprobs else MAX_TOKENS_PER_ENTRY
        max_tokens = MAX_TOKENS_WITH_PROMPT if self.sends_prompt else max_tokens
        texts, text_ends = self._texts(max_tokens)
        end, completion = self.published + len(texts), self.completion
        if end < len(self.token_ids):
            # The other tokens and the end are committed after this part is settled.
            completion = None
        elif texts:
            texts[-1] += self.tail
            text_ends[-1] += len(self.tail)
        elif completion is not None and self.tail:
            # No token is left to carry the text that was held back.
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
            told_prompt=self.told_prompt if self.sends_prompt and texts else (),
            activity=self.activity if self.has_news else None,
        )

    def note_told(self, item: CommitItem, reply: CommitReply) -> None:
        """Note what Redis knows of the activity after the reply to an item."""
        if reply.status is CommitStatus.REWIND:
            # Redis has lost the tail of the log, and perhaps what was told.
            self.told_activity = Activity.WAITING
        elif item.activity and reply.status is CommitStatus.OK:
            self.told_activity = item.activity

    def _first_fingerprint(self) -> str:
        """The fingerprint of the engine that generated the first tokens, which this item contains.

        It replaces the one that CLAIM recorded: that one lacks the adapter, and is of the first
        claim, which may have generated nothing. If another engine began the log and Redis has lost
        it, this is the fingerprint of that engine.
        """
        return self.origin.other_fingerprint or self.origin.fingerprint

    def _texts(self, max_tokens: int) -> tuple[list[str], list[int]]:
        """Texts of the next tokens that fit into one entry, and the offset at which each ends."""
        texts = self.texts[self.published : self.published + max_tokens]
        ends = list(accumulate(map(len, texts)))
        # At least one token: the text of a token is never split, even if it is too long.
        fitting = max(1, bisect_right(ends, MAX_TEXT_PER_ENTRY))
        return texts[:fitting], ends[:fitting]


def _num_bytes(tokens: Sequence[TokenLogprob]) -> int:
    """What these records take in an entry, nearly."""
    tops = (top for one in tokens for top in one.top)
    records: Iterable[TokenLogprob | TopLogprob] = chain(tokens, tops)
    # A byte that is no text takes four in an entry.
    return sum(_RECORD_BYTES + max(len(one.text.encode()), 4 * len(one.raw)) for one in records)
