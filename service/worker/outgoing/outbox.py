"""Holds the outputs of all claims, between the engine thread and the publisher.

It has one Delivery per claim. The engine thread adds tokens and never waits; the publisher takes
everything that was added since, so a slow Redis makes longer chunks and nothing is dropped. Its
size is at most the number of claims (those that have ended and are not committed included), which
intake limits, times the length of one generation.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from time import monotonic
from types import MappingProxyType

from engine.port import RequestOutput
from engine.request import Activity as EngineActivity
from engine.request import FinishReason, Priority
from quire.errors import InvalidRequest
from quire.queue.publish.commit import CommitItem, CommitReply, CommitStatus
from quire.queue.request.claims import Claim
from quire.wire.protocol import Activity, Completion, ErrorInfo
from service.worker.outgoing.completions import Origin, completion_of
from service.worker.outgoing.delivery import Delivery

#: The most claims of one commit; more would block other clients of Redis for too long.
MAX_COMMIT_ITEMS = 256
#: The most entries of one commit that have the tokens of a prompt, each up to MAX_PROMPT_BYTES.
MAX_PROMPTS = 16

NO_ACTIVITIES: Mapping[str, EngineActivity] = MappingProxyType({})


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
        #: Set while all deliveries have ended, and after `close`.
        self._quiet = threading.Event()
        self._deliveries: dict[str, Delivery] = {}
        #: Keys that the publisher has to commit or release, oldest first; the values are unused.
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

    def put(
        self,
        outputs: Iterable[RequestOutput],
        activities: Mapping[str, EngineActivity] = NO_ACTIVITIES,
    ) -> Sequence[str]:
        """Add the outputs of one engine step, and what requests do after it, by key.

        What is said of forgotten claims is dropped. Returns the keys of claims that ended because
        their output cannot be published: the engine need not go on with them.
        """
        now, has_end, refused = self._clock(), False, list[str]()
        with self._changed:
            for output in outputs:
                delivery = self._deliveries.get(output.request.request_id)
                if delivery is None or delivery.is_ended:
                    continue
                assert not output.token_ids or output.start == len(delivery.token_ids)
                delivery.append(output.token_ids, output.text, output.logprobs)
                delivery.token_times += [now] * len(output.token_ids)
                try:
                    if output.start == 0 and output.request.sampling.prompt_logprobs is not None:
                        delivery.tell_prompt(output)
                except InvalidRequest as error:
                    delivery.refuse(error)
                    refused.append(delivery.key)
                    has_end = True
                else:
                    if output.finish_reason is not None:
                        self._end(delivery, output)
                        has_end = True
                self._note_due(delivery)
            for key, activity in activities.items():
                told = self._deliveries.get(key)
                if told is not None and not told.is_ended:
                    told.activity = Activity(activity)
                    self._note_due(told)
            if has_end:
                self._note_quiet()
        return refused

    def end(self, key: str, make: Callable[[Origin], Completion]) -> None:
        """End a claim that the engine never ran, with the record that `make` returns for it."""
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is not None and not delivery.is_ended:
                delivery.completion = make(delivery.origin)
                self._note_due(delivery)
                self._note_quiet()

    def take(
        self, *, timeout: float, but: Collection[str] = ()
    ) -> list[tuple[Delivery, CommitItem | None]]:
        """The due deliveries, each with the item to commit, or None if it is to be released.

        Waits up to `timeout` seconds for the first. A delivery that was taken is due again only
        after `put`, `end` or `settle`. Those with a key in `but` are left: another thread commits
        their last item, and calls `look_again` after it has removed them there.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing or any(key not in but for key in self._due), timeout
            )
            due = islice((key for key in self._due if key not in but), MAX_COMMIT_ITEMS)
            keys = self._with_few_prompts(list(due))
            for key in keys:
                del self._due[key]
            taken = [(delivery := self._deliveries[key], delivery.item()) for key in keys]
            # There may be no item: another worker's tokens can put the log ahead of this engine.
            return [(one, item) for one, item in taken if item is not None or one.is_released]

    def _with_few_prompts(self, keys: Sequence[str]) -> Sequence[str]:
        """The keys that one commit takes: entries with prompts are much longer than others."""
        has_prompt = (self._deliveries[key].sends_prompt for key in keys)
        numbers = accumulate(has_prompt)
        return [key for key, number in zip(keys, numbers, strict=True) if number <= MAX_PROMPTS]

    def look_again(self) -> None:
        """Let `take` look again which deliveries are left."""
        with self._changed:
            self._changed.notify()

    def rest(self, seconds: float) -> None:
        """Wait `seconds`, but not after all claims have ended: only the engine gains by it."""
        self._quiet.wait(seconds)

    def settle(self, key: str, item: CommitItem, *, reply: CommitReply) -> Delivery | None:
        """Apply the reply to a commit; returns the delivery if its terminal record is committed.

        If the log has fewer tokens than the item, after a rewind or a replay, the rest is due
        again.
        """
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is None or reply.status is CommitStatus.FENCED:
                return None
            delivery.published = reply.published
            delivery.note_told(item, reply)
            reached = reply.published == item.start + len(item.token_ids)
            if item.completion is not None and reached:
                return self._remove(key)
            self._note_due(delivery)
            return None

    def take_token_times(self, delivery: Delivery) -> list[float]:
        """The times at which the tokens since the last call left the engine."""
        with self._changed:
            times, delivery.token_times = delivery.token_times, []
            return times

    def forget(self, key: str, *, unless_ended: bool = False) -> Delivery | None:
        """Drop a claim that was lost or released; returns it, or None if it was not there.

        With `unless_ended` a delivery that only waits for its last commit stays: the reply to that
        commit will show whether the claim is lost.
        """
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is None or (unless_ended and delivery.is_ended):
                return None
            return self._remove(key)

    def close(self) -> None:
        """Declare that nothing more will be added; `take` no longer waits."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._quiet.set()

    def release_all(self, error: ErrorInfo) -> None:
        """Release all claims that a dead engine has not ended, after committing their tokens.

        For a suspect this counts as a failed attempt with `error`. The other requests made progress
        or never ran. They may be released by several workers with failing devices, and must not
        become dead letters for that.
        """
        with self._changed:
            for delivery in self._deliveries.values():
                if not delivery.is_ended:
                    delivery.is_released = True
                    delivery.failure = error if delivery.is_suspect else None
                    self._note_due(delivery)

    def claims(self, *, place: int | None = None) -> list[tuple[str, Claim]]:
        """Key and claim of all deliveries, or of those of one place; their leases need renewal."""
        with self._changed:
            return [
                (key, delivery.claim)
                for key, delivery in self._deliveries.items()
                if place is None or delivery.place == place
            ]

    def pictures(self, place: int) -> list[str]:
        """The digests of the pictures of a place's claims that have not ended, each once."""
        with self._changed:
            found = {
                picture.digest
                for one in self._deliveries.values()
                if one.place == place and one.request is not None and not one.is_ended
                for picture in one.request.pictures
            }
        return [digest.hex() for digest in found]

    def holds(self, key: str) -> bool:
        """Whether the claim is still held: not lost, released or fully committed."""
        with self._changed:
            return key in self._deliveries

    def num_open(self, least: Priority) -> int:
        """The number of claims of class `least` or higher that have not ended."""
        with self._changed:
            return sum(
                not delivery.is_ended and delivery.origin.priority >= least
                for delivery in self._deliveries.values()
            )

    def num_by_activity(self, place: int) -> Counter[Activity]:
        """How many claims of a place do what; ended ones are left out."""
        with self._changed:
            return Counter(
                delivery.shown_activity
                for delivery in self._deliveries.values()
                if delivery.place == place and not delivery.is_ended
            )

    def first_rank(self, *, place: int, num_running: int) -> int | None:
        """The lowest rank in the queue of a place's claims that wait for the engine; None for none.

        Running requests count as the first ones of all places.
        """
        with self._changed:
            opened = (one for one in self._deliveries.values() if not one.is_ended)
            waiting = sorted((one.rank, one.place) for one in opened)[num_running:]
            return next((rank for rank, of in waiting if of == place), None)

    def has_trial(self, least: Priority) -> bool:
        """Whether a claim of class `least` or higher is on trial; see Delivery."""
        with self._changed:
            return any(
                delivery.is_on_trial and delivery.origin.priority >= least
                for delivery in self._deliveries.values()
            )

    @property
    def num_claims(self) -> int:
        """The number of claims, including ended ones that are not committed yet."""
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
        """Whether nothing is due: everything added is committed or was taken by the publisher."""
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
        if delivery.num_unpublished > 0 or delivery.is_ended or delivery.has_news:
            self._due[delivery.key] = None
            self._changed.notify()
