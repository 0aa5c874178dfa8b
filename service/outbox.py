"""Holds what live claims still owe their readers, between the engine thread and the publisher.

One Delivery per claim. The engine thread adds tokens to it and never waits; the publisher takes
whatever has gathered, so a slow Redis makes longer chunks and nothing is dropped. Its size is
bounded by the number of claims, ended and uncommitted ones included, which intake limits, times the
length of one generation.

A Delivery keeps all tokens and texts of its request, published ones too: when Redis loses the tail
of a log, any suffix can be sent again.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from time import monotonic

from engine.engine import RequestOutput
from engine.logprobs import Logprobs
from engine.request import FinishReason, Priority, Request
from quire.errors import ProtocolError
from quire.logprobs import TokenLogprob
from quire.protocol import Completion, ErrorInfo, TokenChunk
from quire.transitions import Claim, CommitItem, CommitReply, CommitStatus
from service.completions import Origin, completion_of

#: Claims of one commit; more would hold up the other users of Redis for too long.
MAX_COMMIT_ITEMS = 256
#: Most tokens of one entry, and most characters of its text, though the text of one token is never
#: split. Whatever the ids are, that is far below the largest message that is read, and a commit of
#: MAX_COMMIT_ITEMS claims stays below some tens of megabytes.
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

    The exceptions are `request`, set by intake before the engine has it, and `last_token_time`.

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
        """Earlier claims died with their workers, and this one has published nothing yet.

        The request may be what killed those workers.
        """
        if self.origin.attempts == 1 or self.is_ended:
            return False
        return self.published <= self.origin.num_resumed_tokens

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


class Outbox:
    """All deliveries of the worker, by key. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        on_empty: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._on_empty = on_empty
        self._clock = clock
        #: Held by an intake from its check of `has_trial` until the deliveries it admits are open.
        self.trials = threading.Lock()
        self._changed = threading.Condition()
        #: Set while all deliveries have ended, or once nothing more will be put.
        self._quiet = threading.Event()
        self._deliveries: dict[str, Delivery] = {}
        #: Keys with something to do for the publisher, oldest first; values unused.
        self._due: dict[str, None] = {}
        self._is_closing = False

    def open(self, delivery: Delivery) -> None:
        """Add a claim, before the engine can produce anything for it."""
        with self._changed:
            assert delivery.key not in self._deliveries
            self._deliveries[delivery.key] = delivery
            if not self._is_closing:
                self._quiet.clear()
            self._note_due(delivery)

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        """Add the outputs of one engine step; those of claims that are gone are dropped."""
        now, has_end = self._clock(), False
        with self._changed:
            for output in outputs:
                delivery = self._deliveries.get(output.request.request_id)
                if delivery is None or delivery.is_ended:
                    continue
                assert not output.token_ids or output.start == len(delivery.token_ids)
                delivery.append(output.token_ids, output.text, output.logprobs)
                delivery.token_times += [now] * len(output.token_ids)
                if output.finish_reason is not None:
                    self._end(delivery, output)
                    has_end = True
                self._note_due(delivery)
            if has_end:
                self._note_quiet()

    def end(self, key: str, make: Callable[[Origin], Completion]) -> None:
        """End a claim that the engine never ran, with the record that `make` returns for it."""
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is not None and not delivery.is_ended:
                delivery.completion = make(delivery.origin)
                self._note_due(delivery)
                self._note_quiet()

    def take(self, *, timeout: float) -> list[tuple[Delivery, CommitItem | None]]:
        """Due deliveries with what to commit for each; None marks one to release.

        Waits up to `timeout` seconds for the first. A delivery taken is due again only when
        something new is put, or by `settle`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._is_closing, timeout)
            keys = list(self._due)[:MAX_COMMIT_ITEMS]
            for key in keys:
                del self._due[key]
            return [(delivery := self._deliveries[key], delivery.item()) for key in keys]

    def rest(self, seconds: float) -> None:
        """Wait `seconds`, but no longer than the engine has work: nothing else gains by it."""
        self._quiet.wait(seconds)

    def settle(self, key: str, item: CommitItem, *, reply: CommitReply) -> Delivery | None:
        """Account for the reply to a commit; returns the delivery if its terminal record is in.

        After a rewind, or a replay that reached less far than the item, the rest is due again.
        """
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is None or reply.status is CommitStatus.FENCED:
                return None
            delivery.published = reply.published
            reached = reply.published == item.start + len(item.token_ids)
            if item.completion is not None and reached:
                return self._remove(key)
            self._note_due(delivery)
            return None

    def take_token_times(self, delivery: Delivery) -> list[float]:
        """When each token since the last call left the engine."""
        with self._changed:
            times, delivery.token_times = delivery.token_times, []
            return times

    def forget(self, key: str, *, unless_ended: bool = False) -> Delivery | None:
        """Drop a claim that is lost or given back; returns it, None if it was not there.

        With `unless_ended` a delivery that only waits for its last commit stays: the reply to that
        commit will show whether the claim is lost.
        """
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is None or (unless_ended and delivery.is_ended):
                return None
            return self._remove(key)

    def close(self) -> None:
        """Declare that nothing more will be put: `take` stops waiting."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._quiet.set()

    def give_back(self, error: ErrorInfo) -> None:
        """Release all that a dead engine has not ended, after the tokens it has are committed.

        `error` counts as a failed attempt of those that may be to blame. The others got on, or
        never ran: they may meet one failing device after the other and must not end for that.
        """
        with self._changed:
            for delivery in self._deliveries.values():
                if not delivery.is_ended:
                    delivery.is_released = True
                    delivery.setback = error if delivery.is_suspect else None
                    self._note_due(delivery)

    def claims(self, *, shard: int | None = None) -> list[tuple[str, Claim]]:
        """All claims, or those of one shard, with their keys; their leases must be renewed."""
        with self._changed:
            return [
                (key, delivery.claim)
                for key, delivery in self._deliveries.items()
                if shard is None or delivery.shard == shard
            ]

    def holds(self, key: str) -> bool:
        """Whether the claim has not been lost, given back or settled."""
        with self._changed:
            return key in self._deliveries

    def num_open(self, least: Priority) -> int:
        """Claims of class `least` or better that the engine has not ended yet."""
        with self._changed:
            return sum(
                not delivery.is_ended and delivery.origin.priority >= least
                for delivery in self._deliveries.values()
            )

    def has_trial(self, least: Priority) -> bool:
        """One of class `least` or better may have killed its last workers; see Delivery."""
        with self._changed:
            return any(
                delivery.is_on_trial and delivery.origin.priority >= least
                for delivery in self._deliveries.values()
            )

    @property
    def num_claims(self) -> int:
        """All claims, ended ones included until their end is committed."""
        with self._changed:
            return len(self._deliveries)

    @property
    def num_unpublished_tokens(self) -> int:
        with self._changed:
            return sum(delivery.num_unpublished for delivery in self._deliveries.values())

    @property
    def is_empty(self) -> bool:
        with self._changed:
            return not self._deliveries

    @property
    def is_settled(self) -> bool:
        """Nothing is due: everything put so far is committed, or in the publisher's hands."""
        with self._changed:
            return not self._due

    def _note_quiet(self) -> None:
        if all(delivery.is_ended for delivery in self._deliveries.values()):
            self._quiet.set()

    def _remove(self, key: str) -> Delivery:
        self._due.pop(key, None)
        delivery = self._deliveries.pop(key)
        self._note_quiet()
        if not self._deliveries:
            self._on_empty()
        return delivery

    def _end(self, delivery: Delivery, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.RELEASED:
            delivery.is_released = True
        else:
            delivery.completion = completion_of(delivery.origin, output)

    def _note_due(self, delivery: Delivery) -> None:
        if delivery.num_unpublished > 0 or delivery.is_ended:
            self._due[delivery.key] = None
            self._changed.notify()
