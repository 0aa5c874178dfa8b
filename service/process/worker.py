"""Runs a worker's life: start, serve, drain, stop. No policy; `parts` wires what it runs.

    main      waits for a signal, a drain, the end of a burst, or the death of a thread
    engine    service.loop       owns torch and the Engine
    intake-n  service.incoming.intake     reads, claims, tokenizes; one for each shard
    compiler  service.incoming.compiling  compiles constraints
    publisher service.outgoing.publisher  commits
    heartbeat service.outgoing.leases     renews leases
    keeper    service.outgoing.leases     reaps leases, queues what is due, signs on
    health    service.observe.health     /livez /readyz /metrics

A thread that dies or hangs (service.process.watch) ends the process: its leases then expire and
other workers take the requests over, which a half-alive worker would hold back.
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
from service.incoming import compiling
from service.incoming.intake import Intake
from service.model.served import ServedModel, load_model
from service.observe.vitals import WorkerState
from service.process.disk import require_durability
from service.process.events import DrainAsked, Event, ModelLoaded, ShardEmpty, StopAsked
from service.process.parts import Parts
from service.process.threads import Supervised, ThreadDied
from service.settings.config import Settings

#: How long the engine may take to finish its step and release the remaining requests.
RELEASE_SECONDS = 10.0
#: After a thread has died: how long committing the tokens generated before may take.
LAST_WORDS_SECONDS = 2.0
#: The longest the main thread sleeps. The kernel may deliver a signal to any thread, as it does
#: after the process was stopped; Python runs the handler once the main thread runs again.
LOOK_UP_SECONDS = 1.0
#: How long any other thread may take to end.
JOIN_SECONDS = 10.0

EXIT_OK = 0
#: A thread died, or work was left behind. Leases hand it over.
EXIT_FAILED = 1
#: The model cannot be served on this machine, or Redis cannot keep the promise of `durable`.
EXIT_REFUSED = 2

#: Errors whose message is enough: they are logged without a traceback.
_REFUSALS = (ModelRefused, DurabilityUnavailable)

_log = structlog.get_logger("service.process.worker")


class WorkerDied(Exception):
    """A thread of the worker died; the process must end."""

    def __init__(self, death: ThreadDied) -> None:
        super().__init__(f"thread {death.name} died: {death.error!r}")
        self.death = death


class Worker:
    """One worker process: `run` serves until the end, `stop` asks for it.

    Tests replace `load` and `connect`, to run an engine without a model and a Redis without a
    server.
    """

    #: Which thread died and why, once one has.
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
        self._parts = Parts(settings, load=load, connect=connect, report=self._events.put)
        self.vitals = self._parts.vitals
        self.metrics = self._parts.metrics
        self._outbox = self._parts.outbox
        self._intakes: dict[str, Intake] = {}
        self._threads: dict[str, Supervised] = {}
        self._ending = threading.Event()

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
        """Ask for the end: the first call drains; another while draining releases all at once.

        May be called from any thread and from a signal handler.
        """
        self._events.put(StopAsked())

    @property
    def http_port(self) -> int:
        """The port of the health server."""
        return self._parts.health.port

    def _start(self) -> None:
        """Start what needs no model; the health server first, so that loading can be observed."""
        parts = self._parts
        parts.health.start()
        if self._settings.durable:
            keys = next(iter(parts.brokers.values())).keys
            check = partial(require_durability, parts.connection, keys, ending=self._ending)
            self._launch("durability", check)
        self._launch("engine", parts.loop.run)
        self._launch("publisher", parts.publisher.run)
        self._launch("heartbeat", parts.heartbeat.run)
        self._launch("keeper", parts.keeper.run)

    def _serve(self) -> None:
        """Take requests in once the model is loaded, until asked to stop or the burst is done."""
        busy_shards = set(self._parts.brokers)
        while busy_shards:
            event = self._next_event()
            if isinstance(event, StopAsked | DrainAsked):
                return
            if isinstance(event, ModelLoaded):
                self._open(event.served)
            elif isinstance(event, ShardEmpty):
                busy_shards.discard(event.shard)

    def _drain(self) -> None:
        """Take in nothing new, and let the engine finish within the grace period."""
        give_up = monotonic() + self._settings.drain_seconds
        self.vitals.state = WorkerState.DRAINING
        _log.info("draining", claims=len(self._outbox.claims()))
        self._close_intakes(JOIN_SECONDS)
        while not self._outbox.is_empty:
            event = self._next_event(timeout=give_up - monotonic())
            if event is None or isinstance(event, StopAsked):
                break

    def _release(self) -> None:
        """Give unfinished requests back to the queue, with every token they have."""
        # What waits for a constraint is released by the engine, too.
        self._parts.compiling.stop()
        # The engine ends first, so that its last outputs and the releases are in the outbox. The
        # publisher commits the tokens of a claim before it gives the claim back.
        self._parts.loop.stop()
        if self._intakes:
            self._join("engine", RELEASE_SECONDS)
            # If the engine died instead, `_fail` gives back what it could not release.
            self._raise_a_death()
        self._flush(self._settings.flush_seconds)

    def _stop(self) -> None:
        """End the heartbeat, the keeper and the health server, in this order, after the publisher.

        Leases are renewed until the last commit, so that a slow drain does not get it fenced. The
        keeper signs off from the registry once no claim is held. The health server answers to the
        end, so that a drain can be watched.
        """
        self._ending.set()
        self._parts.compiling.stop()
        self._join(compiling.THREAD, JOIN_SECONDS)
        self._parts.heartbeat.stop()
        self._join("heartbeat", JOIN_SECONDS)
        self._parts.keeper.stop()
        self._join("keeper", JOIN_SECONDS)
        # Threads that died after the last event was read. Without intakes the stop came while the
        # model was loading, and whatever that made fail is not worth a report.
        while self._intakes and (death := self._next_death()):
            self._note_death(death)
        self._parts.health.stop()
        _log.info("worker stopped", claims_left=len(self._outbox.claims()))

    def _fail(self, error: WorkerDied) -> None:
        """Log why, and commit the tokens that were generated before.

        What a dead engine held is given back at once; see `Outbox.give_back` for what counts as an
        attempt. When another thread has died, the leases expire instead, and that counts: given
        back uncounted, a request that kills its worker would kill every worker there is.
        """
        self.vitals.state = WorkerState.FAILED
        death = error.death
        self._note_death(death)
        self._close_intakes(LAST_WORDS_SECONDS)
        if death.name == "engine":
            reason = f"the engine of a worker failed: {type(death.error).__name__}"
            self._outbox.give_back(ErrorInfo("engine_failed", reason))
        self._flush(LAST_WORDS_SECONDS)

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
        """The next death not reported yet; other events no longer matter and are dropped."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, ThreadDied):
                return event
        return None

    def _open(self, served: ServedModel) -> None:
        """Start an intake for each shard, now that the model is loaded."""
        self._intakes = self._parts.complete(served)
        self._launch(compiling.THREAD, self._parts.compiling.run)
        for name, intake in self._intakes.items():
            self._launch(name, intake.run)
        self.vitals.state = WorkerState.READY
        _log.info(
            "worker ready",
            worker=self._settings.worker,
            queue=self._settings.queue,
            model=self._settings.model_name,
            fingerprint=served.fingerprint,
            http_host=self._settings.http_host,
            http_port=self.http_port,
            max_model_len=served.engine.config.max_model_len,
            adapters=len(served.adapters),
            # Without it nothing comes yet, though all is loaded; the reason stands in a warning.
            redis_answers=self.vitals.seconds_since_contact is not None,
            **served.sizes,
        )

    def _close_intakes(self, seconds: float) -> None:
        for intake in self._intakes.values():
            intake.stop()
        for name in self._intakes:
            self._join(name, seconds)

    def _flush(self, seconds: float) -> None:
        """Let the publisher commit all that is in the outbox; after `seconds` it gives up."""
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
                event = self._events.get(timeout=max(0.0, min(LOOK_UP_SECONDS, left)))
            except queue.Empty:
                if left <= LOOK_UP_SECONDS:
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
        has_ended = thread.ends_within(seconds, on_turn=partial(self.vitals.beat, "main"))
        if not has_ended:
            _log.error("thread does not end", thread=name, waited_seconds=seconds)
        return has_ended
