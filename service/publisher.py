"""Publishes: one fenced commit at a time for every request that has something new.

Knows no engine but for giving requests up. A commit that failed is made again with the same items
until Redis answers: commits are idempotent, and whether the claims still hold is for Redis to say.
Meanwhile the outbox gathers, so the next commit carries longer chunks.
"""

import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Protocol, TypeVar

import structlog

from engine.request import FinishReason, RequestTimes
from quire.broker import Broker
from quire.transitions import CommitItem, CommitReply, CommitStatus
from service.contact import UNAVAILABLE, Contact, pauses
from service.metrics import Metrics
from service.outbox import Delivery, Outbox

#: How long the publisher waits for work before it looks up again.
WAIT_SECONDS = 1.0

_Reply = TypeVar("_Reply")
_log = structlog.get_logger("service.publisher")


class Aborts(Protocol):
    """The one thing the publisher asks of the engine's side."""

    def abort(self, key: str, reason: FinishReason) -> None:
        """Give the request up; see `service.loop`."""
        ...


class Publisher:
    """Brings the outbox to Redis. `run` is a thread's work; `stop` may come from any thread."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        *,
        engine: Aborts,
        contact: Contact,
        metrics: Metrics,
        interval_seconds: float = 0.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._engine = engine
        self._contact = contact
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._closing = threading.Event()
        self._gave_up = threading.Event()
        metrics.publish_backlog.set_function(lambda: float(outbox.num_unpublished_tokens))

    def run(self) -> None:
        """Publish until stopped and everything put so far is out."""
        while not (self._closing.is_set() and self._outbox.is_settled):
            began = self._clock()
            due = self._outbox.take(timeout=WAIT_SECONDS)
            self._commit([(delivery, item) for delivery, item in due if item is not None])
            self._release([delivery for delivery, item in due if item is None])
            if self._gave_up.is_set():
                return
            self._closing.wait(max(0.0, began + self._interval_seconds - self._clock()))

    def stop(self) -> None:
        """Return from `run` once everything is out; nothing new may be put."""
        self._closing.set()
        self._outbox.close()

    def give_up(self) -> None:
        """Return from `run` without waiting for Redis any longer; leases hand the rest over."""
        self._gave_up.set()
        self.stop()

    def _commit(self, due: list[tuple[Delivery, CommitItem]]) -> None:
        if not due:
            return
        items = [item for _, item in due]
        began = self._clock()
        replies = self._until_answered("commit", lambda: self._broker.commit(items))
        if replies is None:
            return
        self._metrics.publish_seconds.observe(self._clock() - began)
        self._metrics.publish_entries.observe(len(items))
        for (delivery, item), reply in zip(due, replies, strict=True):
            self._account(delivery, item, reply=reply)

    def _account(self, delivery: Delivery, item: CommitItem, *, reply: CommitReply) -> None:
        """Act on what Redis said about one item."""
        if reply.status is CommitStatus.FENCED:
            self.lose(delivery.key)
            return
        if reply.status is CommitStatus.REWIND:
            self._metrics.rewinds.inc()
            _log.warning(
                "log rewound",
                request_id=delivery.origin.request_id,
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
        """Drop a claim that is someone else's now; nothing more may be said for it.

        With `unless_ended`, one that only waits for its last commit is left alone: a heartbeat that
        crosses that commit finds no lease either.
        """
        delivery = self._outbox.forget(key, unless_ended=unless_ended)
        if delivery is not None:
            self._engine.abort(key, FinishReason.CANCELLED)
            self._metrics.finished["lost"].inc()
            _log.warning("claim lost", request_id=delivery.origin.request_id)

    def cancel(self, key: str) -> None:
        """A caller wants the request to end; its record says so once the engine gave it up."""
        self._engine.abort(key, FinishReason.CANCELLED)

    def _release(self, deliveries: list[Delivery]) -> None:
        """Give claims back whose tokens are all in the log."""
        if not deliveries:
            return
        claims = [delivery.claim for delivery in deliveries]
        if self._until_answered("release", lambda: self._broker.release(claims)) is None:
            return
        for delivery in deliveries:
            self._outbox.forget(delivery.key)
            self._metrics.finished["released"].inc()
            _log.info(
                "request released",
                request_id=delivery.origin.request_id,
                published_tokens=delivery.published,
            )

    def _until_answered(
        self, operation: str, function: Callable[[], list[_Reply]]
    ) -> list[_Reply] | None:
        """Repeat an idempotent call until Redis answers; None only after `give_up`."""
        for pause in pauses():
            try:
                return self._contact.call(operation, function)
            except UNAVAILABLE:
                if self._gave_up.wait(pause):
                    return None
        raise AssertionError("pauses never end")

    def _observe_tokens(self, delivery: Delivery) -> None:
        """Account for the tokens that left the engine since the last commit of this claim."""
        times = self._outbox.take_token_times(delivery)
        if times and delivery.last_token_time is None:
            waited = self._clock() - delivery.origin.received
            self._metrics.first_token_seconds.observe(waited)
        for time in times:
            if delivery.last_token_time is not None:
                self._metrics.inter_token_seconds.observe(time - delivery.last_token_time)
            delivery.last_token_time = time

    def _report_finished(self, delivery: Delivery) -> None:
        """One line and one set of observations for a request whose terminal record is out."""
        completion, origin, metrics = delivery.completion, delivery.origin, self._metrics
        assert completion is not None
        seconds = self._clock() - origin.received
        metrics.finished[completion.finish_reason].inc()
        metrics.e2e_seconds[origin.priority_name].observe(origin.waited_seconds + seconds)
        facts: dict[str, object] = {}
        if delivery.request is not None:
            metrics.request_prompt_tokens.observe(completion.usage.prompt_tokens)
            metrics.request_generation_tokens.observe(completion.usage.completion_tokens)
            facts = phases_of(delivery.request.times, received=origin.received)
            self._observe_phases(facts)
        if completion.error is not None:
            facts |= {"error_code": completion.error.code, "error_field": completion.error.field}
        _log.info(
            "request finished",
            request_id=origin.request_id,
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

    def _observe_phases(self, phases: Mapping[str, object]) -> None:
        for name, histogram in (
            ("queue_seconds", self._metrics.queue_seconds),
            ("prefill_seconds", self._metrics.prefill_seconds),
            ("decode_seconds", self._metrics.decode_seconds),
        ):
            if name in phases:
                histogram.observe(phases[name])


def phases_of(times: RequestTimes, *, received: float) -> dict[str, object]:
    """Seconds of each phase the request came through; a phase it never reached is missing."""
    stamps = [received, times.first_scheduled, times.first_token, times.finished]
    names = ["queue_seconds", "prefill_seconds", "decode_seconds"]
    return {
        name: round(max(0.0, end - start), 4)
        for name, start, end in zip(names, stamps, stamps[1:], strict=False)
        if start is not None and end is not None
    }
