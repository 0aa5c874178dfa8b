"""Receives claimed requests: opens a Delivery for each, and passes a Request to the engine.

Does not know when or how requests are claimed. An invalid request ends with a typed record that
names the field. A request that cannot be read ends as a dead letter. No request ends the worker.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import NamedTuple

import structlog

from engine.request import FinishReason, Priority, Request
from quire.errors import (
    UNAVAILABLE,
    InvalidRequest,
    ProtocolError,
    QuireError,
    UnsupportedVersion,
)
from quire.queue.claim.claim import Claimed
from quire.queue.claim.ingress import Candidate
from quire.queue.request.claims import Claim
from quire.queue.roles import WorkerSide
from quire.wire.constraints import Constraint
from quire.wire.protocol import GenerationRequest
from service.worker.bounded.process import ProcessFailed
from service.worker.incoming.compiling import Compiling
from service.worker.incoming.conversion import engine_request
from service.worker.incoming.origins import (
    QueueClock,
    decoded,
    is_resumable,
    key_of,
    origin_of,
    seconds_since,
)
from service.worker.incoming.pictures import PictureReading
from service.worker.loop import EngineLoop
from service.worker.model.pictures import DecodedPicture
from service.worker.model.served import ServedModel
from service.worker.observe.metrics import Metrics
from service.worker.outgoing.completions import (
    Origin,
    counted,
    not_resumable,
    own_failure,
    rejection,
    short_error,
)
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.outbox import Outbox
from service.worker.settings.bounds import MAX_NAME_LENGTH
from service.worker.settings.config import Settings

#: The most names of other models of which the log tells.
MAX_TOLD = 16

_log = structlog.get_logger("service.worker.incoming.reception")


class Opened(NamedTuple):
    """An open claim: the broker's reply, the Delivery for its output, and the decoded request."""

    claimed: Claimed
    delivery: Delivery
    request: GenerationRequest


class Reception:
    """Receives the claimed requests of one shard. All are opened before the first is admitted.

    Admission tokenizes, which may take longer than a lease, and only the leases of open claims are
    renewed.
    """

    def __init__(
        self,
        broker: WorkerSide,
        outbox: Outbox,
        *,
        place: int,
        loop: EngineLoop,
        compiling: Compiling,
        served: ServedModel,
        settings: Settings,
        contact: Contact,
        metrics: Metrics,
        on_poll: Callable[[], None] = lambda: None,
        queue_clock: QueueClock | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._queue_clock = queue_clock or QueueClock()
        self._broker = broker
        self._outbox = outbox
        self._place = place
        self._loop = loop
        self._compiling = compiling
        self._served = served
        self._settings = settings
        self._contact = contact
        self._metrics = metrics
        self._clock = clock
        self._pictures = PictureReading(broker, contact=contact, settings=settings, on_poll=on_poll)
        #: Names of other models of which the log tells already.
        self._told = set[str]()
        self._told_engines = set[str]()

    def open(self, candidate: Candidate, claimed: Claimed, *, now_ms: int) -> Opened | None:
        """Open a Delivery for a request that was claimed at `now_ms` on the broker's clock.

        None if the request ended here instead, or if Redis fails. Then the lease expires, and
        another worker can take the request.
        """
        try:
            return self._open(candidate, claimed, now_ms=now_ms)
        except QuireError as error:
            _log.error("not taken in", request_id=candidate.request_id, error=str(error))
            return None

    @property
    def has_room(self) -> bool:
        """Whether there is memory for the pictures of further requests."""
        return self._served.pictures is None or self._served.pictures.has_room

    def interrupt(self) -> None:
        """Give back requests whose pictures are not decoded yet; thread-safe."""
        self._pictures.interrupt()

    def close(self) -> None:
        """End what was started for requests."""
        self._pictures.close()

    def admit(self, opened: Opened, *, now_ms: int) -> None:
        """Pass one open request to the engine, end it with a typed error, or give it back.

        It is given back while the pictures of requests before it take all of the memory for them.
        """
        claimed, delivery, request = opened
        if not self.has_room:
            self._give_back(delivery, "no memory for the pictures of further requests")
            return
        prepared = self._prepared(opened, now_ms=now_ms)
        if prepared is None:
            return
        converted, wanted = prepared
        if request.counts_only:
            number = converted.num_prompt_tokens
            self._outbox.end(delivery.key, partial(counted, num_tokens=number))
            return
        if not is_resumable(delivery.origin):
            self._refuse_to_resume(delivery)
            return
        self._note_resume(delivery.origin)
        delivery.request = converted
        if wanted is None:
            self._loop.add(converted)
        else:
            self._compiling.begin(converted, wanted)
        # If the claim was lost after it was opened, the abort came before the engine had the
        # request. Without this second abort the engine would compute it to its end for nobody.
        if claimed.cancel_requested or not self._outbox.holds(delivery.key):
            self._compiling.abort(delivery.key, FinishReason.CANCELLED)

    def _prepared(self, opened: Opened, *, now_ms: int) -> tuple[Request, Constraint | None] | None:
        """The engine's Request and its constraint; None if the request was ended or given back."""
        claimed, delivery, request = opened
        try:
            pictures: Sequence[DecodedPicture] = ()
            if self._served.pictures is not None:
                is_resumed = claimed.num_published > 0
                pictures = self._pictures.pictures_of(request, is_resumed=is_resumed)
            return engine_request(
                request,
                delivery,
                served=self._served,
                settings=self._settings,
                now_ms=now_ms,
                pictures=pictures,
            )
        except UNAVAILABLE as error:
            self._give_back(delivery, error)
        except InvalidRequest as error:
            if error.field == "body.model":
                self._tell_of_other_model(request)
            self._outbox.end(delivery.key, partial(rejection, error=error))
        except Exception as error:  # noqa: BLE001 - a defect here or in a library ends one request.
            if isinstance(error, ProcessFailed) and self._pictures.is_interrupted:
                self._give_back(delivery, error)
            else:
                _log.exception("intake failed", **delivery.origin.names)
                self._outbox.end(delivery.key, partial(own_failure, error=error))
        return None

    def _open(self, candidate: Candidate, claimed: Claimed, *, now_ms: int) -> Opened | None:
        label = candidate.priority.name.lower()
        self._metrics.received[label].inc()
        if claimed.claim.epoch == 1:
            # Later ones have an arrival of before their first claim, or of a pause in between.
            waited = seconds_since(claimed.arrival_us // 1000, now_ms)
            self._metrics.stream_wait_seconds[label].observe(waited)
        try:
            request, invalid = decoded(claimed.request_bytes)
        except ProtocolError as error:
            unknown = isinstance(error, UnsupportedVersion)
            reason = "unsupported_version" if unknown else "undecodable"
            self._bury(claimed.claim, error, reason=reason)
            return None
        if request is not None and claimed.deadline_ms is not None:
            # The queue may have set one.
            request = request.model_copy(update={"deadline_ms": claimed.deadline_ms})
        received = self._clock()
        origin = origin_of(
            claimed,
            request,
            priority=Priority(candidate.priority),
            now_ms=now_ms,
            received=received,
            arrived=self._queue_clock.reading(claimed.ranked_us, now_ms=now_ms, received=received),
            served=self._served,
            model=self._settings.model_name,
        )
        convert = self._served.tokenizer.with_texts
        delivery = Delivery(
            key_of(claimed.claim),
            claimed.claim,
            origin,
            self._place,
            rank=candidate.rank,
            wire_logprob=convert,
        )
        try:
            delivery.recall(claimed.published)
        except ProtocolError as error:
            self._bury(claimed.claim, error, reason="broken_log")
            return None
        self._outbox.open(delivery)
        if request is None:
            assert invalid is not None
            self._outbox.end(delivery.key, partial(rejection, error=invalid))
            return None
        return Opened(claimed, delivery, request)

    def _give_back(self, delivery: Delivery, why: object) -> None:
        """Release a request that cannot be prepared now; if that fails, its lease expires."""
        self._outbox.forget(delivery.key)
        _log.warning("given back", **delivery.origin.names, error=str(why))
        with suppress(QuireError):
            self._contact.call("release", partial(self._broker.release, [delivery.claim]))

    def _tell_of_other_model(self, request: GenerationRequest) -> None:
        """A table of models or a caller may have another name for this worker's model."""
        requested = request.body.get("model")
        if not isinstance(requested, str):
            # The model's name may be nested so deeply that it has no text.
            return
        requested = requested[:MAX_NAME_LENGTH]
        if requested not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(requested)
            _log.warning(
                "requests name another model, and are refused: served_model_name must be the name "
                "in the table of models",
                requested=requested,
                served_model_name=self._settings.model_name,
            )

    def _refuse_to_resume(self, delivery: Delivery) -> None:
        origin = delivery.origin
        fingerprints = {"before": origin.other_fingerprint, "here": origin.fingerprint}
        _log.warning("not resumable", **origin.names, **fingerprints)
        self._outbox.end(delivery.key, not_resumable)

    def _note_resume(self, origin: Origin) -> None:
        """Count and log a request that an earlier claim started."""
        if origin.epoch == 1:
            return
        if origin.num_resumed_tokens > 0:
            self._metrics.resumed["changed" if origin.fingerprint_changed else "same"].inc()
        told: dict[str, object] = {"fingerprint_changed": origin.fingerprint_changed}
        other = origin.other_fingerprint
        if other is not None and other not in self._told_engines:
            # Once, since it is long: all requests of a worker that has died have the same.
            if len(self._told_engines) < MAX_TOLD:
                self._told_engines.add(other)
            told |= {"other_fingerprint": other}
        _log.info(
            "request resumed",
            **origin.names,
            tokens=origin.num_resumed_tokens,
            attempts=origin.attempts,
            **told,
        )

    def _bury(self, claim: Claim, error: ProtocolError, *, reason: str) -> None:
        """End a request as a dead letter, which keeps its bytes. It cannot be read or continued."""
        info = short_error(reason, str(error))
        bury = partial(self._broker.dead_letter, claim, f"{reason}: {info.message}", error=info)
        self._contact.call("bury", bury)
        self._metrics.dead_lettered[reason].inc()
        self._metrics.finished["rejected"].inc()
        names = {"request_id": claim.request_id, "epoch": claim.epoch}
        _log.warning("dead letter", **names, reason=reason, error=info.message)
