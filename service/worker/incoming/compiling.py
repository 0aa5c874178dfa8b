"""Compiles the constraints of requests on a separate thread, between intake and the engine.

A request waits here for its constraint while other requests are claimed, admitted and computed. Its
claim is open meanwhile, so its lease is renewed. A cancel, its deadline or a drain end the wait at
once. After a takeover the published output is replayed in slices, a slice of
one request after a slice of another, so that a long output does not make the others wait.
"""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import Protocol

import structlog

from engine.constraint import Constraint as EngineConstraint
from engine.request import FinishReason, Priority, Request
from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from quire.wire.protocol import Completion
from service.worker.constraints.grammars import CompiledGrammars, Grammars, NoGrammars
from service.worker.constraints.probe import Probe, ProbedGrammars
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.completions import Origin, own_failure, rejection
from service.worker.outgoing.outbox import Outbox
from service.worker.settings.config import Settings

#: The name of the thread.
THREAD = "compiler"
#: The longest sleep of the thread before it reports to `Vitals` again.
IDLE_SECONDS = 1.0
#: Tokens that are replayed in one slice after a takeover. A slice takes some milliseconds for an
#: ordinary constraint, and seconds for one whose every step is as slow as the limits allow.
REPLAY_TOKENS = 64

_log = structlog.get_logger("service.worker.incoming.compiling")


class Engine(Protocol):
    """The methods of the engine loop that are needed here; see `service.worker.loop`."""

    def add(self, request: Request) -> None: ...

    def add_aborted(self, request: Request, reason: FinishReason) -> None: ...

    def abort(self, key: str, reason: FinishReason) -> None: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its constraint."""

    request: Request
    wanted: Constraint
    constraint: EngineConstraint | None = None
    num_replayed: int = 0


class Compiling:
    """The requests that wait for their constraints. A thread of its own calls `run`.

    All other methods are thread-safe, and none of them waits for a compilation.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        engine: Engine,
        vitals: Vitals,
        settings: Settings,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._outbox = outbox
        self._engine = engine
        self._vitals = vitals
        self._settings = settings
        self._clock = clock
        self._grammars: Grammars = NoGrammars("no model is loaded")
        self._probe: Probe | None = None
        #: Probes of models that are no longer served; the thread closes them.
        self._retired: list[Probe] = []
        self._changed = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        #: What is computed next: a heap of (negative priority, number of the slice, request key).
        self._slices: list[tuple[int, int, str]] = []
        self._numbers = count()
        self._is_stopping = False

    def serve(self, grammars: Grammars) -> None:
        """Compile with `grammars` from now on. Those that use the library get a probe process."""
        if self._probe is not None:
            self._retired.append(self._probe)
            self._probe = None
        self._grammars = grammars
        if isinstance(grammars, CompiledGrammars):
            self._probe = Probe(
                grammars,
                cpu_seconds=self._settings.constraint_compile_seconds,
                memory_bytes=self._settings.constraint_compile_bytes,
                on_poll=self._look,
            )
            self._grammars = ProbedGrammars(grammars, self._probe)

    def begin(self, request: Request, wanted: Constraint) -> None:
        """Pass a request to the engine with its constraint, at once if that is compiled already.

        The request's delivery must be open in the outbox: if the constraint cannot be compiled, the
        request ends there.
        """
        waiting = _Waiting(request, wanted)
        if not request.output_token_ids and self._grammars.is_ready(wanted):
            with self._changed:
                self._waiting[request.request_id] = waiting
            self._advance(waiting)
            return
        with self._changed:
            self._waiting[request.request_id] = waiting
            if self._is_stopping:
                self._abandon(waiting, FinishReason.RELEASED)
            else:
                self._queue(waiting)
                self._changed.notify()

    def abort(self, key: str, reason: FinishReason) -> None:
        """Abort a request that waits here or is in the engine; otherwise do nothing."""
        with self._changed:
            waiting = self._waiting.get(key)
            if waiting is not None:
                self._abandon(waiting, reason)
                return
        self._engine.abort(key, reason)

    def num_waiting(self, least: Priority) -> int:
        """The number of waiting requests of class `least` or a more urgent one."""
        with self._changed:
            return sum(one.request.priority >= least for one in self._waiting.values())

    def stop(self) -> None:
        """Release all waiting requests and make `run` return. Call it before the loop's `stop`.

        A compilation that is running in the library ends by itself; its result is not used.
        """
        with self._changed:
            self._is_stopping = True
            for waiting in list(self._waiting.values()):
                self._abandon(waiting, FinishReason.RELEASED)
            self._changed.notify_all()
        if self._probe is not None:
            self._probe.interrupt()

    def release(self) -> None:
        """Release all waiting requests; the model is about to be switched.

        The intakes must have ended. Call it before the loop's `switch`.
        """
        with self._changed:
            for waiting in list(self._waiting.values()):
                self._abandon(waiting, FinishReason.RELEASED)
        if self._probe is not None:
            self._probe.interrupt()

    def run(self) -> None:
        """Compile and replay until stopped."""
        try:
            while not self._is_stopping:
                self._look()
                while self._retired:
                    self._retired.pop().close()
                if (waiting := self._next()) is not None:
                    self._advance(waiting)
        finally:
            if self._probe is not None:
                self._probe.close()

    def _look(self) -> None:
        """Report to `Vitals`, and abort requests whose deadline has passed."""
        self._vitals.beat(THREAD)
        now = self._clock()
        with self._changed:
            late = [
                key
                for key, waiting in self._waiting.items()
                if waiting.request.deadline is not None and waiting.request.deadline <= now
            ]
        for key in late:
            self.abort(key, FinishReason.DEADLINE)

    def _next(self) -> _Waiting | None:
        """The request to go on with; None if none has come within IDLE_SECONDS."""
        with self._changed:
            self._changed.wait_for(lambda: self._slices or self._is_stopping, IDLE_SECONDS)
            while self._slices:
                _, _, key = heapq.heappop(self._slices)
                if key in self._waiting:
                    return self._waiting[key]
        return None

    def _advance(self, waiting: _Waiting) -> None:
        """Compile the constraint of a request, or replay the next slice of its output.

        Then pass the request to the engine, or queue it for another slice if output remains.
        """
        request = waiting.request
        output = request.output_token_ids
        upto = min(waiting.num_replayed + REPLAY_TOKENS, len(output))
        try:
            if waiting.constraint is None:
                waiting.constraint = self._grammars.constraint(waiting.wanted, output[:upto])
            else:
                waiting.constraint.is_complete(output[:upto])
        except InvalidRequest as error:
            self._end(waiting, partial(rejection, error=error))
            return
        except Exception as error:  # noqa: BLE001 - a defect here or in a library ends one request.
            # Otherwise it was released meanwhile, and the probe was interrupted.
            if self._waiting.get(request.request_id) is waiting:
                _log.exception("constraint cannot be compiled", request=request.request_id)
            self._end(waiting, partial(own_failure, error=error))
            return
        waiting.num_replayed = upto
        with self._changed:
            if self._waiting.get(request.request_id) is not waiting:
                return
            if upto < len(output):
                self._queue(waiting)
            else:
                # Under the lock, so that an abort finds the request either here or in the engine.
                del self._waiting[request.request_id]
                request.constraint = waiting.constraint
                self._engine.add(request)

    def _end(self, waiting: _Waiting, make: Callable[[Origin], Completion]) -> None:
        """End a request that never reaches the engine, unless it has left the waiting list."""
        key = waiting.request.request_id
        with self._changed:
            if self._waiting.get(key) is not waiting:
                return
            del self._waiting[key]
        self._outbox.end(key, make)

    def _abandon(self, waiting: _Waiting, reason: FinishReason) -> None:
        """Pass a request to the engine as aborted: without its constraint it must not run."""
        del self._waiting[waiting.request.request_id]
        self._engine.add_aborted(waiting.request, reason)

    def _queue(self, waiting: _Waiting) -> None:
        request = waiting.request
        heapq.heappush(self._slices, (-request.priority, next(self._numbers), request.request_id))
