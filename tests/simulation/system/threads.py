"""What the modules `threading`, `queue` and `time` offer, on virtual time.

Only what Quire uses of them. An object belongs to the timeline that was active when it was made.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.system.timeline import Process, Task, Timeline

_active: Timeline | None = None


def activate(timeline: Timeline | None) -> None:
    """Makes this the timeline on which everything new lives."""
    global _active
    _active = timeline


def active() -> Timeline:
    """The timeline of the running schedule."""
    assert _active is not None, "no schedule is running"
    return _active


class Event:
    """See threading.Event."""

    def __init__(self) -> None:
        self._timeline = active()
        self._is_set = False
        self._waiting: dict[Task, None] = {}

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._timeline.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        give_up = None if timeout is None else self._timeline.now + timeout
        while not self._is_set:
            left = None if give_up is None else give_up - self._timeline.now
            if left is not None and left < 0:
                break
            self._timeline.park(self._waiting, timeout=left)
            if left == 0:
                break
        return self._is_set


class Lock:
    """See threading.Lock; now and then another thread gets in before."""

    def __init__(self) -> None:
        self._timeline = active()
        self._is_held = False
        self._waiting: dict[Task, None] = {}

    def acquire(self) -> bool:
        while self._is_held:
            self._timeline.park(self._waiting, timeout=None)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        for task in self._waiting:
            self._timeline.wake(task)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """See threading.RLock."""

    def __init__(self) -> None:
        super().__init__()
        self._holder: Task | None = None
        self._depth = 0

    def acquire(self) -> bool:
        if self._holder is not self._timeline.current or self._holder is None:
            super().acquire()
            self._holder = self._timeline.current
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            super().release()


class Condition:
    """See threading.Condition. A lock that is given may be held once only while it waits."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._timeline = active()
        self._lock = RLock() if lock is None else lock
        self._sleeping: dict[Task, None] = {}
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        began = self._timeline.now
        self._lock.release()
        try:
            self._timeline.park(self._sleeping, timeout=timeout)
        finally:
            self._lock.acquire()
        return timeout is None or self._timeline.now < began + timeout

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        give_up = None if timeout is None else self._timeline.now + timeout
        while not (value := predicate()):
            left = None if give_up is None else give_up - self._timeline.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return value

    def notify(self, n: int = 1) -> None:
        for task in list(self._sleeping)[:n]:
            self._timeline.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._sleeping))


class SimpleQueue:
    """See queue.SimpleQueue."""

    def __init__(self) -> None:
        self._timeline = active()
        self._items: deque[Any] = deque()
        self._waiting: dict[Task, None] = {}

    def __class_getitem__(cls, _item: object) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        for task in self._waiting:
            self._timeline.wake(task)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        give_up = None if timeout is None else self._timeline.now + timeout
        while not self._items:
            left = None if give_up is None else give_up - self._timeline.now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._timeline.park(self._waiting, timeout=left)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Thread:
    """See threading.Thread. It is a task of the process that starts it."""

    def __init__(
        self,
        target: Callable[..., None] | None = None,
        *,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        del daemon  # Every thread ends with its process here.
        self.name = name
        self._target, self._args = target, args
        self._task: Task | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args)

    def start(self) -> None:
        timeline = active()
        self._task = timeline.spawn(current_process(), self.name, self.run)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        timeline = active()
        assert self._task is not None
        give_up = None if timeout is None else timeline.now + timeout
        while not self._task.is_done:
            left = None if give_up is None else give_up - timeline.now
            if left is not None and left <= 0:
                return
            timeline.park(self._task.joiners, timeout=left)


def current_process() -> Process:
    """The process whose code is running."""
    task = active().current
    assert task is not None
    return task.process
