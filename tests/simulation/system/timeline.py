"""Virtual time: many processes of many threads, one after the other, in an order drawn from a seed.

A Task is a greenlet that stands for a thread. It gives up control only where a thread would wait:
for the network, an event, a queue, a lock, a moment. What is due next on the clock goes on next;
when nothing is due the clock jumps. So a schedule is a pure function of its seed, and an hour of it
costs what its events cost.

Knows neither Redis nor Quire.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import greenlet

#: Where the virtual clock begins, as unix seconds; deadlines are absolute moments.
EPOCH_SECONDS = 1_700_000_000.0

#: How long a task that was woken waits for its turn at most: what a scheduler of threads may take.
WAKE_SECONDS = 0.0005

#: Events after which a schedule counts as caught in a circle.
MAX_EVENTS = 400_000


class ProcessKilled(BaseException):
    """The process of this task is gone; what unwinds may not touch the world any more."""


class Stuck(Exception):
    """The schedule made no progress to its end within its bound of events."""


@dataclass(eq=False)
class Process:
    """What is killed, frozen and cut off from the network as one."""

    name: str
    alive: bool = True
    frozen_until: float = 0.0
    cut_off_until: float = 0.0
    tasks: list[Task] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """One thread of a process. `ticket` tells its latest appointment from older ones."""

    process: Process
    name: str
    greenlet: greenlet.greenlet
    ticket: int = 0
    is_done: bool = False
    #: Tasks that wait for the end of this one.
    joiners: dict[Task, None] = field(default_factory=dict)


class Timeline:
    """The clock, the appointments, and the record of what happened."""

    def __init__(self, seed: int, *, keeps_trace: bool = False) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.failures: list[str] = []
        self._keeps_trace = keeps_trace
        self._hub = greenlet.getcurrent()
        self._appointments: list[tuple[float, int, int, Task]] = []
        self._num_appointments = 0
        self._num_events = 0
        self._processes: dict[Process, None] = {}
        self.current: Task | None = None

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def unix_seconds(self) -> float:
        """The moment on the calendar."""
        return EPOCH_SECONDS + self.now

    def note(self, event: str, subject: str = "", **facts: Any) -> None:
        """Counts an event, and keeps a line of it where a trace is wanted."""
        self.counts[event] += 1
        if self._keeps_trace:
            told = " ".join(f"{name}={value}" for name, value in facts.items())
            self.tell(event, f"{subject} {told}".strip())

    def tell(self, what: str, about: object = "") -> None:
        """Adds a line to the trace, where one is wanted."""
        if self._keeps_trace:
            who = self.current.process.name + "/" + self.current.name if self.current else "-"
            self.trace.append(f"{self.now:9.4f}  {who:24s} {what} {about}".rstrip())

    # What tasks call.

    def sleep(self, seconds: float) -> None:
        """Lets the others go on until `seconds` have passed."""
        task = self._running()
        self._appoint(task, self.now + max(0.0, seconds))
        self._yield(task)

    def park(self, waiting: dict[Task, None], *, timeout: float | None) -> None:
        """Waits in line until `wake` or the timeout; the caller looks again why it woke."""
        task = self._running()
        waiting[task] = None
        task.ticket += 1
        if timeout is not None:
            self._appoint(task, self.now + max(0.0, timeout))
        try:
            self._yield(task)
        finally:
            waiting.pop(task, None)

    def wake(self, task: Task) -> None:
        """Ends the wait of a parked task, some short time from now."""
        if not task.is_done:
            self._appoint(task, self.now + self.random.random() * WAKE_SECONDS)

    def spawn(self, process: Process, name: str, work: Callable[[], None]) -> Task:
        """Starts a thread of a process."""
        task = Task(process, name, greenlet.greenlet(lambda: self._perform(task, work), self._hub))
        process.tasks = [old for old in process.tasks if not old.is_done]
        process.tasks.append(task)
        self._processes[process] = None
        self.wake(task)
        return task

    def kill(self, process: Process) -> None:
        """The end of a process without a word: none of its code has any effect after this."""
        process.alive = False
        for task in process.tasks:
            if not task.is_done:
                self._bury(task)

    # What the owner of the timeline calls.

    def run(self, until: Callable[[], bool]) -> None:
        """Lets everything happen until the condition holds. Stuck when it never does."""
        while not until():
            self._num_events += 1
            if not self._appointments or self._num_events > MAX_EVENTS:
                raise Stuck(f"no end after {self._num_events} events at {self.now:.3f} s")
            due, _, ticket, task = heapq.heappop(self._appointments)
            if task.is_done or ticket != task.ticket:
                continue
            self.now = max(self.now, due)
            if task.process.frozen_until > self.now:
                self._push(task, task.process.frozen_until)
                continue
            self.current = task
            task.greenlet.switch()
            self.current = None

    def close(self) -> None:
        """Ends every task that is left, so that no greenlet outlives the schedule."""
        for process in self._processes:
            self.kill(process)

    def _perform(self, task: Task, work: Callable[[], None]) -> None:
        try:
            work()
        except (ProcessKilled, greenlet.GreenletExit):
            pass
        except BaseException as error:  # noqa: BLE001 - whatever a thread dies of is a finding.
            self.failures.append(f"{task.process.name}/{task.name} died of {error!r}")
        finally:
            task.is_done = True
            for joiner in task.joiners:
                self.wake(joiner)

    def _running(self) -> Task:
        task = self.current
        assert task is not None, "only a task can wait"
        if not task.process.alive:
            raise ProcessKilled
        return task

    def _yield(self, task: Task) -> None:
        self._hub.switch()
        if not task.process.alive:
            raise ProcessKilled

    def _bury(self, task: Task) -> None:
        """Unwinds a dead task; whatever it tries on the way meets ProcessKilled."""
        if not task.greenlet or task.greenlet is greenlet.getcurrent():
            # Never started, or it is the one that killed its own process.
            task.is_done = task.is_done or not task.greenlet
            return
        before, self.current = self.current, task
        parent, task.greenlet.parent = task.greenlet.parent, greenlet.getcurrent()
        try:
            task.greenlet.throw(ProcessKilled)
        finally:
            self.current = before
            if not task.greenlet.dead:
                task.greenlet.parent = parent
            task.is_done = True

    def _appoint(self, task: Task, moment: float) -> None:
        task.ticket += 1
        self._push(task, moment)

    def _push(self, task: Task, moment: float) -> None:
        self._num_appointments += 1
        # Appointments of one moment are kept in the order in which they were made.
        entry = (moment, self._num_appointments, task.ticket, task)
        heapq.heappush(self._appointments, entry)
