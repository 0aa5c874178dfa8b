"""Publishes outputs: one fenced commit at a time, with all requests that have something new.

It uses the engine only to abort requests. A failed commit is repeated with the same items until
Redis answers: commits are idempotent, and Redis decides whether the claims are still valid.
Meanwhile tokens accumulate in the outbox, so the next commit has longer chunks. They also
accumulate while the publisher rests after a commit. Worker, Redis and readers spend as much time on
a commit with one token of a request as with ten, and on a small machine the model loses that time.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Protocol, TypeVar

import structlog

from engine.request import FinishReason
from quire.errors import UNAVAILABLE, ProtocolError, QuireError
from quire.queue.lease.lease import BackOff
from quire.queue.publish.commit import CommitItem, CommitReply, CommitStatus
from quire.queue.request.arguments import MAX_ITEMS_PER_CALL
from quire.queue.roles import WorkerSide
from quire.wire.protocol import ErrorInfo, Execution
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.completions import latency_of
from service.worker.outgoing.contact import Contact, pauses
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.lanes import Lanes
from service.worker.outgoing.outbox import Outbox
from service.worker.outgoing.traces import Exemplar, NoTraces, Traces

#: The longest wait for work; after it the thread shows a sign of life.
WAIT_SECONDS = 1.0
#: The longest rest because of `publish_share`, so that a stream gets ten chunks per second.
LONGEST_REST_SECONDS = 0.1
#: Pauses before the next attempt of a request that may have made a worker's device fail.
FAILURE_PAUSES = BackOff(first_seconds=1.0, longest_seconds=300.0)

#: One claim and the item to commit for it.
Due = tuple[Delivery, CommitItem]
#: The same; without an item the claim is to be released.
Taken = tuple[Delivery, CommitItem | None]

_Reply = TypeVar("_Reply")
_log = structlog.get_logger("service.worker.outgoing.publisher")


class Aborts(Protocol):
    """The part of the engine loop that the publisher uses."""

    def abort(self, key: str, reason: FinishReason) -> None:
        """Abort the request; see `service.worker.loop`."""
        ...


class Publisher:
    """Commits the outbox to Redis. `run` is a thread's body; any thread may call the others."""

    def __init__(
        self,
        brokers: Mapping[int, WorkerSide],
        outbox: Outbox,
        *,
        engine: Aborts,
        vitals: Vitals,
        contact: Contact,
        metrics: Metrics,
        traces: Traces | None = None,
        interval_seconds: float = 0.0,
        share: float = 1.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._brokers = brokers
        self._outbox = outbox
        self._engine = engine
        self._vitals = vitals
        self._contact = contact
        self._metrics = metrics
        self._traces = traces or NoTraces()
        self._interval_seconds = interval_seconds
        self._share = share
        self._clock = clock
        self._closing = threading.Event()
        self._gave_up = threading.Event()
        self._lanes = Lanes[Taken](self._publish_in_lane)
        #: Deliveries that a lane has. A commit must not have two items of one request.
        self._in_lanes: set[str] = set()
        metrics.publish_backlog.set_function(lambda: float(outbox.num_unpublished_tokens))

    def run(self) -> None:
        """Publish until stopped and everything in the outbox is committed."""
        while not (self._closing.is_set() and self._outbox.is_settled and self._lanes.is_idle):
            self._vitals.beat("publisher")
            due = self._outbox.take(timeout=WAIT_SECONDS, but=self._in_lanes)
            began = self._clock()
            for node, part in self._by_node(due).items():
                if node:
                    self._in_lanes.update(delivery.key for delivery, _ in part)
                    self._lanes.hand(node, part)
                else:
                    self._publish(part)
            # A node that does not answer must not delay what is due at the others.
            self._lanes.wait(LONGEST_REST_SECONDS)
            if self._gave_up.is_set():
                return
            self._rest(self._clock() - began)
        self._lanes.close(seconds=WAIT_SECONDS)

    def stop(self) -> None:
        """Make `run` return after everything is committed; nothing more may be added."""
        self._closing.set()
        self._outbox.close()

    def give_up(self) -> None:
        """Make `run` return without waiting for Redis; the other leases expire."""
        self._gave_up.set()
        self.stop()

    def _rest(self, worked_seconds: float) -> None:
        """Leave the cores to the model, for longer after a longer commit."""
        rest_seconds = min(LONGEST_REST_SECONDS, worked_seconds * (1 / self._share - 1))
        self._outbox.rest(max(rest_seconds, self._interval_seconds - worked_seconds))

    def _by_node(self, taken: Sequence[Taken]) -> dict[str, list[Taken]]:
        """The deliveries by the node of a cluster that owns their shard; one server has no name."""
        nodes = {place: broker.node for place, broker in self._brokers.items()}
        parts: dict[str, list[Taken]] = {}
        for delivery, item in taken:
            parts.setdefault(nodes[delivery.place], []).append((delivery, item))
        return parts

    def _publish_in_lane(self, taken: Sequence[Taken]) -> None:
        try:
            self._publish(taken)
        finally:
            self._in_lanes.difference_update(delivery.key for delivery, _ in taken)
            self._outbox.look_again()

    def _publish(self, taken: Sequence[Taken]) -> None:
        """Commit and release deliveries of one server; its shards share a round trip."""
        due: dict[int, list[Due]] = {}
        released: dict[int, list[Delivery]] = {}
        for delivery, item in taken:
            if item is None:
                released.setdefault(delivery.place, []).append(delivery)
            else:
                due.setdefault(delivery.place, []).append((delivery, item))
        if len(due) > 1 and max(map(len, due.values())) <= MAX_ITEMS_PER_CALL:
            self._commit_together(due)
        else:
            for place, part in due.items():
                self._commit(self._brokers[place], part)
        for place, deliveries in released.items():
            self._release(self._brokers[place], deliveries)

    def _commit_together(self, due: Mapping[int, Sequence[Due]]) -> None:
        parts = [(self._brokers[place], [item for _, item in part]) for place, part in due.items()]
        (broker, items), *others = parts
        began = self._clock()
        found: Sequence[list[CommitReply] | QuireError]
        try:
            # Not by `contact`: it is tried once, and what fails here is committed alone below.
            found = broker.commit_with(items, others)
        except (*UNAVAILABLE, ProtocolError) as error:
            found = [error] * len(parts)
        for (place, part), replies in zip(due.items(), found, strict=True):
            if isinstance(replies, QuireError):
                # Alone it is repeated for as long as it takes. Nothing is committed twice.
                self._commit(self._brokers[place], part)
            else:
                self._contact.call("commit", partial(list, replies))
                self._committed(part, replies, began=began)

    def _commit(self, broker: WorkerSide, due: Sequence[Due]) -> None:
        items = [item for _, item in due]
        began = self._clock()
        try:
            replies = self._until_answered("commit", partial(broker.commit, items))
        except ProtocolError as error:
            # One item can never be committed: commit each alone to find out which.
            if len(due) == 1:
                self._condemn(broker, due[0][0], error)
            else:
                for one in due:
                    self._commit(broker, [one])
            return
        if replies is not None:
            self._committed(due, replies, began=began)

    def _committed(
        self, due: Sequence[Due], replies: Sequence[CommitReply], *, began: float
    ) -> None:
        self._metrics.publish_seconds.observe(self._clock() - began)
        self._metrics.publish_entries.observe(len(due))
        for (delivery, item), reply in zip(due, replies, strict=True):
            self._account(delivery, item, reply=reply)

    def _condemn(self, broker: WorkerSide, delivery: Delivery, error: ProtocolError) -> None:
        """End a request whose commit Redis refuses. If Redis refuses that, too, drop the claim."""
        info = ErrorInfo("internal_error", "the output cannot be written")
        names = delivery.origin.names
        _log.error("commit refused", **names, error=str(error))
        try:
            self._until_answered("fail", lambda: [broker.fail(delivery.claim, info)])
        except ProtocolError as worse:
            _log.error("request cannot be ended", **names, error=str(worse))
        if self._outbox.forget(delivery.key) is not None:
            self._engine.abort(delivery.key, FinishReason.CANCELLED)
            self._of(delivery).finished["error"].inc()

    def _account(self, delivery: Delivery, item: CommitItem, *, reply: CommitReply) -> None:
        """Handle the reply of Redis for one item."""
        if reply.status is CommitStatus.FENCED:
            self._of(delivery).fenced.inc()
            self.lose(delivery.key)
            return
        if reply.status is CommitStatus.REWIND:
            self._of(delivery).rewinds.inc()
            _log.warning(
                "log rewound",
                **delivery.origin.names,
                sent_from=item.start,
                published=reply.published,
            )
        self._observe_tokens(delivery)
        finished = self._outbox.settle(delivery.key, item, reply=reply)
        if finished is not None:
            self._report_finished(finished)
        elif reply.cancel_requested:
            self.cancel(delivery.key)

    def lose(self, key: str, *, unless_ended: bool = False) -> None:
        """Drop a claim that this worker has lost; nothing more may be published for it.

        With `unless_ended`, a claim that only waits for the reply to its last commit stays: after
        that commit it has no lease, so a heartbeat at the same time finds none.
        """
        delivery = self._outbox.forget(key, unless_ended=unless_ended)
        if delivery is not None:
            self._engine.abort(key, FinishReason.CANCELLED)
            self._of(delivery).finished["lost"].inc()
            self._traces.ended(delivery, "lost")
            _log.warning("claim lost", **delivery.origin.names)

    def cancel(self, key: str) -> None:
        """Abort a request that a caller has cancelled; its record follows from the last output."""
        self._engine.abort(key, FinishReason.CANCELLED)

    def _release(self, broker: WorkerSide, deliveries: Sequence[Delivery]) -> None:
        """Release claims whose tokens are all in the log."""
        for delivery in deliveries:
            if delivery.failure is not None:
                self._fail(broker, delivery, delivery.failure)
        rest = [delivery for delivery in deliveries if delivery.failure is None]
        if not rest:
            return
        claims = [delivery.claim for delivery in rest]
        try:
            if self._until_answered("release", lambda: broker.release(claims)) is None:
                return
        except ProtocolError as error:
            if len(rest) > 1:
                for delivery in rest:
                    self._release(broker, [delivery])
                return
            _log.error("claim cannot be released", **rest[0].origin.names, error=str(error))
        for delivery in rest:
            self._forget_released(delivery)

    def _fail(self, broker: WorkerSide, delivery: Delivery, error: ErrorInfo) -> None:
        """Release one claim as a failed attempt; the next attempt follows after a pause."""
        try:
            failed = self._until_answered(
                "fail", lambda: [broker.fail(delivery.claim, error, retry=FAILURE_PAUSES)]
            )
        except ProtocolError as worse:
            names = delivery.origin.names
            _log.error("claim cannot be released", **names, error=str(worse))
        else:
            if failed is None:
                return
        self._forget_released(delivery)

    def _forget_released(self, delivery: Delivery) -> None:
        self._outbox.forget(delivery.key)
        self._of(delivery).finished["released"].inc()
        self._traces.ended(delivery, "released")
        _log.info(
            "request released",
            **delivery.origin.names,
            published_tokens=delivery.published,
            counts_as_attempt=delivery.failure is not None,
        )

    def _until_answered(
        self, operation: str, function: Callable[[], list[_Reply]]
    ) -> list[_Reply] | None:
        """Repeat an idempotent call until Redis answers; None only after `give_up`.

        Raises:
            ProtocolError: Redis answered, and repeating the call would not change the answer.
        """
        for pause in self._vitals.each("publisher", pauses()):
            try:
                return self._contact.call(operation, function)
            except UNAVAILABLE:
                if self._gave_up.wait(pause):
                    return None
        raise AssertionError("pauses never end")

    def _observe_tokens(self, delivery: Delivery) -> None:
        """Observe latencies from the times at which tokens left the engine since the last call."""
        times = self._outbox.take_token_times(delivery)
        metrics = self._of(delivery)
        if times:
            metrics.published_tokens[delivery.origin.priority_name].inc(len(times))
            metrics.tenant_tokens.add(delivery.origin.tenant, len(times))
        if times and delivery.last_token_time is None:
            waited = self._clock() - delivery.origin.received
            metrics.first_token_seconds.observe(waited)
        for time in times:
            if delivery.last_token_time is not None:
                metrics.inter_token_seconds.observe(time - delivery.last_token_time)
            delivery.last_token_time = time

    def _report_finished(self, delivery: Delivery) -> None:
        """Log and observe a request whose terminal record is committed."""
        completion, origin, metrics = delivery.completion, delivery.origin, self._of(delivery)
        assert completion is not None
        exemplar = self._traces.ended(delivery, str(completion.finish_reason))
        seconds = self._clock() - origin.received
        metrics.finished[completion.finish_reason].inc()
        if (latency := latency_of(completion, due=origin.due, now=self._clock())) is not None:
            metrics.targeted[latency].inc()
        metrics.e2e_seconds[origin.priority_name].observe(origin.waited_seconds + seconds, exemplar)
        facts: dict[str, object] = {}
        if delivery.request is not None and completion.usage.prompt_tokens:
            metrics.request_prompt_tokens.observe(completion.usage.prompt_tokens)
            metrics.request_generation_tokens.observe(completion.usage.completion_tokens)
            facts = phases_of(completion.execution)
            self._observe_phases(metrics, facts, exemplar)
        if completion.error is not None:
            facts |= {"error_code": completion.error.code, "error_field": completion.error.field}
        _log.info(
            "request finished",
            **origin.names,
            outcome=str(completion.finish_reason),
            kind=origin.kind,
            priority=origin.priority_name,
            tenant=origin.tenant,
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
            cached_tokens=completion.usage.cached_tokens,
            resumed_tokens=origin.num_resumed_tokens,
            fingerprint_changed=origin.fingerprint_changed,
            preemptions=completion.preemptions,
            attempts=origin.attempts,
            stream_wait_seconds=round(origin.waited_seconds, 4),
            claim_seconds=round(seconds, 4),
            **facts,
        )

    def _of(self, delivery: Delivery) -> Metrics:
        """The metrics of the model that a claim's queue has."""
        return self._metrics.of(delivery.place)

    def _observe_phases(
        self, metrics: Metrics, phases: Mapping[str, object], exemplar: Exemplar | None
    ) -> None:
        for name, histogram in (
            ("queue_seconds", metrics.queue_seconds),
            ("prefill_seconds", metrics.prefill_seconds),
            ("decode_seconds", metrics.decode_seconds),
        ):
            if name in phases:
                histogram.observe(phases[name], exemplar)


def phases_of(execution: Execution | None) -> dict[str, object]:
    """Seconds that the request spent in each phase; phases it did not complete are missing."""
    if execution is None:
        return {}
    phases = {
        "queue_seconds": execution.waiting_seconds,
        "prefill_seconds": execution.prefill_seconds,
        "decode_seconds": execution.decode_seconds,
    }
    return {name: seconds for name, seconds in phases.items() if seconds is not None}
