"""Keeps the programs of `quire serve` running, and ends them in their order.

In one thread: it waits for the logs of its programs, for their ends, and for signals.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from quire.cli.serve.child import Child, LogFile, Program
from quire.errors import QuireError

#: The most restarts of one program in RESTART_SECONDS; then the command ends.
MAX_RESTARTS = 5
RESTART_SECONDS = 300.0
#: After a second signal: how often each program is told again, and when it is killed.
HURRY_SECONDS = 0.5
KILL_SECONDS = 3.0
#: Programs that start others, such as `timeout`, pass on a signal that a terminal sends to all.
SAME_SIGNAL_SECONDS = 0.3
#: How long it waits at most until it looks again at what runs.
LOOK_SECONDS = 1.0
#: The exit code of a program that cannot begin, whatever it is started again for.
EXIT_REFUSED = 2

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProgramFailed(QuireError):
    """A program cannot go on; `exit_code` is the command's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """All programs of a run. A context manager: at its end no program runs.

    Args:
        folder: where the logs are.
        tell: gets a sentence for a person.
        hear: gets each event of a program's log.
        show: gets each line of a program's log, with the program's name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tell: Callable[[str], None],
        hear: Callable[[Child, Mapping[str, Any]], None],
        show: Callable[[str, str], None],
    ) -> None:
        #: How many stop signals have come.
        self.num_stops = 0
        self._folder, self._tell, self._hear, self._show = folder, tell, hear, show
        self._children: list[Child] = []
        #: Those whose end was not noticed yet.
        self._alive: list[Child] = []
        self._logs: list[LogFile] = []
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Any] = {}
        self._is_ending = False
        self._last_stop = -SAME_SIGNAL_SECONDS

    def __enter__(self) -> Self:
        # A signal writes into this pipe and so ends the wait for logs.
        self._awaken, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._awaken, selectors.EVENT_READ)
        self._alarm, self._alarm_before = alarm, signal.set_wakeup_fd(alarm)
        # `nohup` lets its command ignore that its terminal is closed.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signals = [one for one in _SIGNALS if not (is_kept and one is signal.SIGHUP)]
        self._handlers = {one: signal.signal(one, self._on_signal) for one in signals}
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_now()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._alarm_before)
        self._selector.close()
        os.close(self._awaken)
        os.close(self._alarm)
        for log in self._logs:
            log.close()

    def start(self, program: Program) -> Child:
        """Starts a program, which is started again when it dies. ProgramFailed."""
        try:
            log = LogFile(self._folder / f"{program.name}.log")
        except OSError as error:
            reason = f"no log can be written in {self._folder} (--data): {error.strerror}"
            raise ProgramFailed(reason, 1) from error
        self._logs.append(log)
        child = Child(program, log)
        self._children.append(child)
        self._launch(child)
        return child

    def running(self, *kinds: str) -> list[Child]:
        """The programs of these kinds that run."""
        return [one for one in self._children if one.program.kind in kinds and one.is_running()]

    def keeps(self, kind: str) -> bool:
        """Whether a program of this kind runs, or has ended without being noticed and replaced."""
        return any(child.program.kind == kind for child in self._alive)

    def turn(self, seconds: float) -> None:
        """Waits for logs, ends and signals, at most so long; starts again what has died.

        ProgramFailed if a program cannot go on.
        """
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                _empty(self._awaken)
            else:
                self._read(key.data)
        for child in [child for child in self._alive if not child.is_running()]:
            self._read(child)
            self._alive.remove(child)
            if not child.is_silent:
                # A process that it has started holds the other end.
                self._selector.unregister(child.output)
            child.close()
            if not self._is_ending:
                self._bury(child)

    def drain(self, orders: Sequence[Sequence[str]]) -> bool:
        """Asks the programs of some kinds to end, waits for that, and asks those of the next.

        A second signal ends the rest at once. Whether each program ended as it was asked to.
        """
        is_clean, self._is_ending = True, True
        for kinds in orders:
            asked = self.running(*kinds)
            for child in asked:
                child.signal(signal.SIGTERM)
            while any(child.is_running() for child in asked):
                if self.num_stops > 1:
                    self.end_now()
                    return False
                self.turn(LOOK_SECONDS)
            for child in asked:
                if code := child.exit_code():
                    self._tell(f"{child.name} {_how(code)} while it was drained")
                    is_clean = False
        return is_clean

    def end_now(self) -> None:
        """Ends all programs within KILL_SECONDS, Redis last, which keeps what it was told."""
        self._is_ending = True
        servers = {id(child) for child in self.running("redis")}
        others = [child for child in self._children if id(child) not in servers]
        for group in (others, [child for child in self._children if id(child) in servers]):
            give_up = time.monotonic() + KILL_SECONDS
            last_count = self.num_stops
            while alive := [child for child in group if child.is_running()]:
                is_late = time.monotonic() > give_up or self.num_stops > last_count
                for child in alive:
                    child.signal(signal.SIGKILL if is_late else signal.SIGTERM)
                self.turn(HURRY_SECONDS)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            # It begins a drain, and hurries none: nobody who closes a terminal asks for that.
            self.num_stops = max(1, self.num_stops)
        elif now - self._last_stop >= SAME_SIGNAL_SECONDS:
            self.num_stops += 1
        self._last_stop = now

    def _launch(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:
            raise ProgramFailed(f"{child.name} cannot be started: {error}", 1) from error
        self._selector.register(child.output, selectors.EVENT_READ, child)
        self._alive.append(child)

    def _read(self, child: Child) -> None:
        was_silent = child.is_silent
        for event in child.events(lambda line: self._show(child.name, line)):
            self._hear(child, event)
        if child.is_silent and not was_silent:
            # A pipe at its end would end each wait at once.
            self._selector.unregister(child.output)

    def _bury(self, child: Child) -> None:
        """Starts again what has died; leaves what has ended by itself; gives up at the limit."""
        code = child.exit_code()
        assert code is not None
        if code == EXIT_REFUSED:
            raise ProgramFailed(f"{child.name}: {child.why_it_ended()}", code)
        # Redis has no end that nobody misses. A worker that was drained ends with 0.
        if code == 0 and child.program.kind != "redis":
            self._tell(f"{child.name} was asked to end, and is not started again")
            return
        now = time.monotonic()
        while child.deaths and child.deaths[0] < now - RESTART_SECONDS:
            child.deaths.popleft()
        child.deaths.append(now)
        how = _how(code)
        if len(child.deaths) > MAX_RESTARTS:
            raise ProgramFailed(
                f"{child.name} {how}, and was started again {MAX_RESTARTS} times in "
                f"{RESTART_SECONDS:.0f} s; its last words: {child.why_it_ended()}",
                1,
            )
        self._launch(child)
        self._tell(f"{child.name} {how}; it is started again as process {child.process_id}")


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        # Most of the real-time signals have no names.
        return f"was ended by signal {-code}"


def _empty(source: int) -> None:
    while True:
        try:
            if not os.read(source, 4096):
                return
        except BlockingIOError:
            return
