"""Runs the engine on the one thread that owns torch. It never waits for Redis.

Requests arrive through a mailbox, outputs go to the outbox; neither ever blocks the engine. The
model is loaded on this thread, too, because torch keeps much of its state per thread.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

import structlog

from engine.errors import RequestRejected
from engine.port import TokenEngine
from engine.request import FinishReason, Request
from service.worker.model.served import ServedModel
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.completions import own_failure, refusal
from service.worker.outgoing.outbox import Outbox

#: The longest sleep of an idle engine; after it the thread shows a sign of life.
IDLE_SECONDS = 1.0

#: The kinds of mail to the engine loop: a request to add; a key to abort, with the reason; a
#: request to add and abort before any step, with the reason; None, which only wakes the loop up.
Mail = Request | tuple[str | Request, FinishReason] | None

_log = structlog.get_logger("service.worker.loop")


class EngineLoop:
    """Owns one engine. `run` is the body of the engine thread; any thread may call the others."""

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
        self._leaving = threading.Event()
        self._outbox = outbox
        self._vitals = vitals
        self._metrics = self._next_metrics = metrics
        self._on_loaded = on_loaded
        self._clock = clock
        self._mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._engine: TokenEngine | None = None
        self._was_idle = True
        self._num_steps = 0
        #: Number of running requests after the last step, the share of the KV cache that they use,
        #: and the tokens generated since the start.
        self.num_running = 0
        self.kv_cache_usage = 0.0
        self.num_generated = 0
        #: Those of engines before, less what this one had generated when it was taken up.
        self._generated_before = 0

    def run(self) -> None:
        """Load the model, then step while there is work, until stopped. A switch does it again.

        Raises:
            DeviceFailed, and any other error after which the engine is unusable: the process must
            end.
        """
        while True:
            # Nothing here refers to a model that is no longer served: its memory must be free.
            self._serve(self._load())
            if self._stopping.is_set():
                return
            self._vitals.loading()

    def switch(self, load: Callable[[], ServedModel], metrics: Metrics) -> None:
        """Release all requests, then serve the model that `load` returns.

        The intakes must have ended. `metrics` are those of the next model.
        """
        self._load, self._next_metrics = load, metrics
        self._leaving.set()
        self._mailbox.put(None)

    def add(self, request: Request) -> None:
        """Pass a request to the engine; its delivery must be open in the outbox."""
        self._mailbox.put(request)

    def add_aborted(self, request: Request, reason: FinishReason) -> None:
        """Pass a request that ends at once with `reason`; the engine computes nothing for it."""
        self._mailbox.put((request, reason))

    def abort(self, key: str, reason: FinishReason) -> None:
        """Abort a request, in any state; unknown keys are ignored.

        Calls the engine directly, so that it takes effect in the middle of a step. Also sends a
        mail, in case the request itself is still in the mailbox.
        """
        if self._engine is not None:
            self._engine.abort(key, reason)
        self._mailbox.put((key, reason))

    def stop(self) -> None:
        """Make `run` release the remaining requests and return. The intakes must have ended."""
        self._stopping.set()
        self._mailbox.put(None)

    def _serve(self, served: ServedModel) -> None:
        """Serve one model until stopped or switched; then release its requests."""
        self._leaving.clear()
        self._metrics = self._next_metrics
        first = served.engine.snapshot()
        self._metrics.begin_engine(first)
        self._generated_before = self.num_generated - first.generated_tokens
        self._engine, self._was_idle, self._num_steps = served.engine, True, 0
        self._on_loaded(served)
        while not (self._stopping.is_set() or self._leaving.is_set()):
            self._pass(served.engine)
        self._release_all(served.engine)
        self._engine = None

    def _pass(self, engine: TokenEngine) -> None:
        """Read the mail, then compute one step; without work, sleep until mail arrives."""
        is_idle = not engine.has_work()
        if is_idle and not self._was_idle:
            self._check_laws(engine)
        self._was_idle = is_idle
        self._vitals.passed(is_busy=not is_idle)
        self._take_mail(engine, timeout=IDLE_SECONDS if is_idle else 0.0)
        if engine.has_work():
            # Busy before the step, so that a step that never returns counts as a stall.
            self._vitals.passed(is_busy=True)
            if is_idle:
                # Otherwise the metrics would show an idle engine while its first step hangs.
                self._metrics.observe_engine(engine.snapshot())
            self._step(engine)

    def _take_mail(self, engine: TokenEngine, *, timeout: float) -> None:
        """Handle all mail, after waiting up to `timeout` seconds for the first piece."""
        try:
            mail = self._mailbox.get(block=timeout > 0.0, timeout=timeout)
            while True:
                self._read(engine, mail)
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            pass

    def _read(self, engine: TokenEngine, mail: Mail) -> None:
        if isinstance(mail, Request):
            try:
                engine.add_request(mail)
            except RequestRejected as error:
                self._outbox.end(mail.request_id, partial(refusal, error=error))
            except Exception as error:  # noqa: BLE001 - as in intake: only this request fails.
                _log.exception("request cannot be added")
                self._outbox.end(mail.request_id, partial(own_failure, error=error))
                engine.abort(mail.request_id, FinishReason.ERROR)
        elif mail is not None:
            one, reason = mail
            if isinstance(one, Request):
                self._read(engine, one)
                one = one.request_id
            engine.abort(one, reason)

    def _step(self, engine: TokenEngine) -> None:
        outputs = engine.step(self._clock)
        for key in self._outbox.put(outputs, engine.take_activities()):
            engine.abort(key, FinishReason.CANCELLED)
        snapshot = engine.snapshot()
        if outputs or snapshot.steps > self._num_steps:
            self._vitals.progressed()
        self._num_steps = snapshot.steps
        self.num_running = snapshot.num_running
        self.kv_cache_usage = snapshot.kv_cache_usage
        self.num_generated = self._generated_before + snapshot.generated_tokens
        self._metrics.observe_engine(snapshot)

    def _release_all(self, engine: TokenEngine) -> None:
        """Release unfinished requests. These steps compute nothing, because all are aborted."""
        self._take_mail(engine, timeout=0.0)
        for key in engine.alive_request_ids():
            engine.abort(key, FinishReason.RELEASED)
        while engine.has_work():
            self._outbox.put(engine.step(self._clock))
        self.num_running, self.kv_cache_usage = 0, 0.0
        self._metrics.observe_engine(engine.snapshot())

    def _check_laws(self, engine: TokenEngine) -> None:
        """Check the invariants of an idle engine. A violation is only logged and counted."""
        for law in engine.violations():
            self._metrics.violations.inc()
            _log.error("engine law broken", law=law)
