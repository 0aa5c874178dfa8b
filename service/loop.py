"""Runs the engine on the one thread that owns torch, at a pace of its own whatever Redis does.

Requests come in through a mailbox, outputs go out into the outbox; neither ever makes the engine
wait. The model is loaded on this thread too, because much of torch's state is kept per thread.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

import structlog

from engine.engine import Engine
from engine.errors import RequestRejected
from engine.request import FinishReason, Request
from service.model.served import ServedModel
from service.observe.metrics import Metrics
from service.observe.vitals import Vitals
from service.outgoing.completions import own_failure, refusal
from service.outgoing.outbox import Outbox

#: How long an idle engine sleeps at most before it shows a sign of life.
IDLE_SECONDS = 1.0

#: A request to add, one to abort (its key and why), one to add and abort before any step, or None
#: to wake the loop up.
Mail = Request | tuple[str | Request, FinishReason] | None

_log = structlog.get_logger("service.loop")


class EngineLoop:
    """Owns one Engine. `run` is the engine thread's work; the other methods are for all threads."""

    def __init__(
        self,
        load: Callable[[], ServedModel],
        outbox: Outbox,
        *,
        vitals: Vitals,
        metrics: Metrics,
        on_loaded: Callable[[ServedModel], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._load = load
        self._outbox = outbox
        self._vitals = vitals
        self._metrics = metrics
        self._on_loaded = on_loaded
        self._clock = clock
        self._mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._engine: Engine | None = None
        self._was_idle = True
        self._num_steps = 0
        #: Requests in the running state after the last step.
        self.num_running = 0

    def run(self) -> None:
        """Load the model, then step while there is work, until stopped.

        Raises:
            DeviceFailed, and whatever else the engine cannot survive: the process must end.
        """
        served = self._load()
        self._engine = served.engine
        self._on_loaded(served)
        while not self._stopping.is_set():
            self._turn(served.engine)
        self._release_all(served.engine)

    def add(self, request: Request) -> None:
        """Hand a request to the engine; its delivery must be open in the outbox."""
        self._mailbox.put(request)

    def add_aborted(self, request: Request, reason: FinishReason) -> None:
        """Hand over a request that is to end at once: the engine computes nothing for it."""
        self._mailbox.put((request, reason))

    def abort(self, key: str, reason: FinishReason) -> None:
        """Abort a request, in any state; unknown keys are ignored.

        The engine is told directly, so that it takes effect in the middle of a step, and by mail as
        well, for a request that is itself still in the mailbox.
        """
        if self._engine is not None:
            self._engine.abort(key, reason)
        self._mailbox.put((key, reason))

    def stop(self) -> None:
        """Make `run` release what is left and return. The intakes must have ended before."""
        self._stopping.set()
        self._mailbox.put(None)

    def _turn(self, engine: Engine) -> None:
        """One round: mail, then a step; with nothing to compute, sleep until mail comes."""
        is_idle = not engine.has_work()
        if is_idle and not self._was_idle:
            self._check_laws(engine)
        self._was_idle = is_idle
        self._vitals.turned(is_busy=not is_idle)
        self._take_mail(engine, timeout=IDLE_SECONDS if is_idle else 0.0)
        if engine.has_work():
            # Busy from here on, so that a step that never returns is seen as a stall.
            self._vitals.turned(is_busy=True)
            if is_idle:
                # Otherwise the metrics show an idle engine for as long as its first step hangs.
                self._metrics.observe_engine(engine.snapshot())
            self._step(engine)

    def _take_mail(self, engine: Engine, *, timeout: float) -> None:
        """Handle all mail there is, after waiting up to `timeout` seconds for the first piece."""
        try:
            mail = self._mailbox.get(block=timeout > 0.0, timeout=timeout)
            while True:
                self._read(engine, mail)
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            pass

    def _read(self, engine: Engine, mail: Mail) -> None:
        if isinstance(mail, Request):
            try:
                engine.add_request(mail)
            except RequestRejected as error:
                self._outbox.end(mail.request_id, partial(refusal, error=error))
            except Exception as error:  # noqa: BLE001 - as in intake: it costs one request.
                _log.exception("request cannot be added")
                self._outbox.end(mail.request_id, partial(own_failure, error=error))
                engine.abort(mail.request_id, FinishReason.ERROR)
        elif mail is not None:
            one, reason = mail
            if isinstance(one, Request):
                self._read(engine, one)
                one = one.request_id
            engine.abort(one, reason)

    def _step(self, engine: Engine) -> None:
        outputs = engine.step(self._clock)
        self._outbox.put(outputs)
        snapshot = engine.snapshot()
        if outputs or snapshot.steps > self._num_steps:
            self._vitals.progressed()
        self._num_steps = snapshot.steps
        self.num_running = snapshot.num_running
        self._metrics.observe_engine(snapshot)

    def _release_all(self, engine: Engine) -> None:
        """Release what is unfinished. These steps compute nothing: their plans are empty."""
        self._take_mail(engine, timeout=0.0)
        for key in engine.alive_request_ids():
            engine.abort(key, FinishReason.RELEASED)
        while engine.has_work():
            self._outbox.put(engine.step(self._clock))

    def _check_laws(self, engine: Engine) -> None:
        """Check the invariants of an idle engine. A broken one is logged and counted, no more."""
        for law in engine.violations():
            self._metrics.violations.inc()
            _log.error("engine law broken", law=law)
