"""Runs a worker: start, serve, drain, stop. Decides no policy; `parts` builds what it runs.

    main      waits for a signal, a drain, the end of a burst, or the death of a thread
    engine    loop                owns torch and the Engine
    intake-n  incoming.intake     reads, claims, tokenizes; one for each shard
    compiler  incoming.compiling  compiles constraints
    publisher outgoing.publisher  commits
    heartbeat outgoing.leases     renews leases
    keeper    outgoing.leases     reaps leases, queues due requests, registers the worker
    chooser   process.chooser     which of several models is served next; not with only one
    health    observe.health      /livez /readyz /metrics

The modules are those of `service.worker`. A thread that dies or hangs (`watch`) ends the process.
Then the leases expire and other workers take the requests over; a worker that ran on without a
thread would keep them.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic

import redis
import structlog

from engine.errors import ModelRefused
from quire.errors import DurabilityUnavailable
from quire.transport.connection import connect as connect_redis
from quire.wire.protocol import ErrorInfo
from service.worker.incoming import compiling
from service.worker.incoming.intake import Intake
from service.worker.model.served import ServedModel, load_model
from service.worker.observe.vitals import WorkerState
from service.worker.process import chooser
from service.worker.process.disk import require_durability
from service.worker.process.events import (
    DrainRequested,
    Event,
    ModelLoaded,
    PlaceEmpty,
    StopRequested,
    SwitchChosen,
)
from service.worker.process.parts import WorkerParts
from service.worker.process.threads import Supervised, ThreadDied
from service.worker.settings.config import Settings

#: How long the engine may take to finish its step and release the remaining requests.
RELEASE_SECONDS = 10.0
#: After a thread has died: how long committing the tokens generated before may take.
LAST_COMMIT_SECONDS = 2.0
#: The longest sleep of the main thread. The kernel may deliver a signal to any thread, for instance
#: after the process was stopped; Python runs the handler only when the main thread runs again.
WAKE_UP_SECONDS = 1.0
#: How long any other thread may take to end.
JOIN_SECONDS = 10.0

EXIT_OK = 0
#: A thread died, or claims are left, which other workers take over when their leases expire.
EXIT_FAILED = 1
#: The model cannot be served on this machine, or Redis cannot keep the promise of `durable`.
EXIT_REFUSED = 2

#: Errors that are logged with their message and without a traceback.
_REFUSALS = (ModelRefused, DurabilityUnavailable)

_log = structlog.get_logger("service.worker.process.worker")


class WorkerDied(Exception):
    """A thread of the worker died; the process must end."""

    def __init__(self, death: ThreadDied) -> None:
        super().__init__(f"thread {death.name} died: {death.error!r}")
        self.death = death


class Worker:
    """One worker process: `run` serves until `stop` is called.

    Tests replace `load` and `connect`, to run an engine without a model and a Redis without a
    server.
    """

    #: The first thread that died, with its exception.
    death: ThreadDied | None = None

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[Settings], ServedModel] = load_model,
        connect: Callable[..., redis.Redis] = connect_redis,
    ) -> None:
        self._settings = settings
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._parts = WorkerParts(settings, load=load, connect=connect, report=self._events.put)
        self.vitals = self._parts.vitals
        self.metrics = self._parts.metrics
        self._outbox = self._parts.outbox
        self._intakes: dict[str, Intake] = {}
        #: Whether a model has been loaded.
        self._is_open = False
        self._threads: dict[str, Supervised] = {}
        self._ending = threading.Event()
        #: When the switch began that is under way, and how its model comes into memory.
        self._switching: tuple[float, str] | None = None

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code of the process."""
        try:
            self._start()
            self._serve()
            self._drain()
            self._release()
        except WorkerDied as error:
            self._fail(error)
            return EXIT_REFUSED if isinstance(error.death.error, _REFUSALS) else EXIT_FAILED
        finally:
            self._stop()
        return EXIT_OK if self._outbox.is_empty and self.death is None else EXIT_FAILED

    def stop(self) -> None:
        """Ask the worker to end: the first call drains, a second one releases all claims at once.

        May be called from any thread and from a signal handler.
        """
        self._events.put(StopRequested())

    @property
    def http_port(self) -> int:
        """The port of the health server."""
        return self._parts.health.port

    def _start(self) -> None:
        """Start what needs no model: the health server first, so that it answers while loading."""
        parts = self._parts
        parts.health.start()
        if self._settings.durable:
            shards = [broker.keys for broker in parts.brokers.values()]
            check = partial(require_durability, parts.connection, shards, ending=self._ending)
            self._launch("durability", check)
        self._launch("engine", parts.loop.run)
        self._launch("publisher", parts.publisher.run)
        self._launch("heartbeat", parts.heartbeat.run)
        self._launch("keeper", parts.keeper.run)

    def _serve(self) -> None:
        """Claim requests after the model is loaded, until asked to stop or the burst is done."""
        busy_places = set(self._parts.brokers)
        while busy_places:
            event = self._next_event()
            if isinstance(event, StopRequested | DrainRequested):
                return
            if isinstance(event, ModelLoaded):
                self._open(event.served)
            elif isinstance(event, SwitchChosen):
                self._switch(event.model)
            elif isinstance(event, PlaceEmpty):
                busy_places.discard(event.place)

    def _drain(self) -> None:
        """Claim nothing new, and let the engine finish within the grace period."""
        give_up = monotonic() + self._settings.drain_seconds
        self.vitals.state = WorkerState.DRAINING
        _log.info("draining", claims=len(self._outbox.claims()))
        self._close_intakes(JOIN_SECONDS)
        while not self._outbox.is_empty:
            event = self._next_event(timeout=give_up - monotonic())
            if event is None or isinstance(event, StopRequested):
                break

    def _release(self) -> None:
        """Release unfinished requests to the queue, with all their tokens."""
        # Requests that wait for a constraint are passed to the engine, which releases them.
        self._parts.compiling.stop()
        # The engine ends first, so that its last outputs and the releases are in the outbox. The
        # publisher commits the tokens of a claim before it releases the claim.
        self._parts.loop.stop()
        if self._is_open:
            self._join("engine", RELEASE_SECONDS)
            # If the engine died instead, `_fail` releases what it could not.
            self._raise_a_death()
        self._flush(self._settings.flush_seconds)

    def _stop(self) -> None:
        """End the heartbeat, the keeper and the health server, in this order, after the publisher.

        Leases are renewed until the last commit, so that it is not fenced after a slow drain. The
        keeper then registers the worker as stopped. The health server answers until the end, so
        that a drain can be observed.
        """
        self._ending.set()
        self._parts.compiling.stop()
        self._join(compiling.THREAD, JOIN_SECONDS)
        self._parts.heartbeat.stop()
        self._join("heartbeat", JOIN_SECONDS)
        if self._parts.chooser is not None:
            self._parts.chooser.stop()
            self._join(chooser.THREAD, JOIN_SECONDS)
        self._parts.keeper.stop()
        self._join("keeper", JOIN_SECONDS)
        # Report threads that died after the last event was read. Not before intakes: then the stop
        # came while the model was loading, and errors caused by that are expected.
        while self._is_open and (death := self._next_death()):
            self._note_death(death)
        self._parts.health.stop()
        self._parts.traces.close()
        _log.info("worker stopped", claims_left=len(self._outbox.claims()))

    def _fail(self, error: WorkerDied) -> None:
        """Log the reason, and commit the tokens that were generated before.

        After the death of the engine its claims are released at once; see `Outbox.release_all` for
        which of them count as a failed attempt. After the death of another thread the leases
        expire, which counts as an attempt for all: if it did not, a request that kills its worker
        would kill every worker.
        """
        self.vitals.state = WorkerState.FAILED
        death = error.death
        self._note_death(death)
        self._close_intakes(LAST_COMMIT_SECONDS)
        if death.name == "engine":
            reason = f"the engine of a worker failed: {type(death.error).__name__}"
            self._outbox.release_all(ErrorInfo("engine_failed", reason))
        self._flush(LAST_COMMIT_SECONDS)

    def _note_death(self, death: ThreadDied) -> None:
        self.death = self.death or death
        if isinstance(death.error, _REFUSALS):
            _log.critical("worker cannot serve", reason=str(death.error))
        else:
            _log.critical("worker died", thread=death.name, exc_info=death.error)

    def _raise_a_death(self) -> None:
        if death := self._next_death():
            raise WorkerDied(death)

    def _next_death(self) -> ThreadDied | None:
        """The next unreported death; drops other events, which no longer matter."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, ThreadDied):
                return event
        return None

    def _open(self, served: ServedModel) -> None:
        """Start an intake for each shard. Called after the model is loaded."""
        parts = self._parts
        if self._switching is not None:
            self._note_switch(*self._switching)
        self._intakes, self._is_open = parts.complete(served), True
        if compiling.THREAD not in self._threads:
            self._launch(compiling.THREAD, parts.compiling.run)
            if parts.chooser is not None:
                self._launch(chooser.THREAD, parts.chooser.run)
        for name, intake in self._intakes.items():
            self._launch(name, intake.run)
        self.vitals.state = WorkerState.READY
        _log.info(
            "worker ready",
            worker=self._settings.worker,
            queue=parts.place.settings.queue,
            model=parts.model,
            makes="text" if served.vectors is None else served.vectors.kind,
            has_chats=served.tokenizer.why_no_chat is None,
            fingerprint=served.fingerprint,
            http_host=self._settings.http_host,
            http_port=self.http_port,
            max_model_len=served.engine.config.max_model_len,
            adapters=len(served.adapters),
            # False: the model is loaded, but no request comes yet; a warning has the reason.
            redis_answers=self.vitals.seconds_since_contact is not None,
            **served.sizes,
        )

    def _switch(self, model: str) -> None:
        """Serve another model: its requests are claimed as soon as it is in memory."""
        began, before = monotonic(), self._parts.model
        _log.info("switching", model=model, before=before, claims=self._outbox.num_claims)
        self._close_intakes(JOIN_SECONDS)
        for name in self._intakes:
            # The thread and its intake refer to the model, whose memory may be needed.
            del self._threads[name]
        self._intakes = {}
        self._switching = (began, self._parts.switch(model))

    def _note_switch(self, began: float, source: str) -> None:
        metrics = self._parts.place.metrics
        metrics.switches[source].inc()
        metrics.switch_seconds[source].observe(monotonic() - began)
        self._switching = None

    def _close_intakes(self, seconds: float) -> None:
        for intake in self._intakes.values():
            intake.stop()
        for name in self._intakes:
            self._join(name, seconds)

    def _flush(self, seconds: float) -> None:
        """Let the publisher commit everything in the outbox; after `seconds` it gives up."""
        self._parts.publisher.stop()
        if not self._join("publisher", seconds):
            self._parts.publisher.give_up()
            self._join("publisher", JOIN_SECONDS)

    def _next_event(self, *, timeout: float | None = None) -> Event | None:
        """The next event, or None after `timeout` seconds. WorkerDied when a thread has died."""
        give_up = inf if timeout is None else monotonic() + timeout
        event = None
        while event is None:
            self.vitals.beat("main")
            left = give_up - monotonic()
            try:
                event = self._events.get(timeout=max(0.0, min(WAKE_UP_SECONDS, left)))
            except queue.Empty:
                if left <= WAKE_UP_SECONDS:
                    return None
        if isinstance(event, ThreadDied):
            raise WorkerDied(event)
        return event

    def _launch(self, name: str, part: Callable[[], None]) -> None:
        watched = partial(self.vitals.during, name, part)
        self._threads[name] = Supervised(name, watched, report=self._events.put)
        self._threads[name].start()

    def _join(self, name: str, seconds: float) -> bool:
        """Wait for a thread's end; False if it was never started or takes longer."""
        thread = self._threads.get(name)
        if thread is None:
            return False
        has_ended = thread.ends_within(seconds, on_wait=partial(self.vitals.beat, "main"))
        if not has_ended:
            _log.error("thread does not end", thread=name, waited_seconds=seconds)
        return has_ended
