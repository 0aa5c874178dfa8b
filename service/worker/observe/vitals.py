"""The worker's state, the signs of life of its threads, progress, and contact with Redis.

Each thread writes its own values; health checks, heartbeat and metrics read them. Every write is
one assignment of a plain value, so readers need no lock. Values that are read together may be from
slightly different times.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from time import monotonic
from typing import NamedTuple, TypeVar

#: An idle engine thread without a pass of its loop for this time counts as hung.
LOOP_PASS_SECONDS = 30.0
#: The same for any other thread. One call to an unreachable Redis may take most of this time: it
#: tries several sentinels, and the resolver of their names may be unreachable as well.
THREAD_PASS_SECONDS = 180.0

#: The threads that show signs of life. There is an intake for each shard: `intake-0` and so on.
THREADS = ("main", "engine", "intake", "compiler", "publisher", "heartbeat", "keeper", "chooser")

_Item = TypeVar("_Item")


class WorkerState(StrEnum):
    """The states of a worker, in this order; FAILED can follow each of them."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Silence(NamedTuple):
    """A thread, the time of its last sign of life, and the longest allowed time without one."""

    thread: str
    since: float
    limit_seconds: float


class Vitals:
    """The values of one worker; see the module. All times are from `clock`, in seconds."""

    def __init__(
        self, *, stall_timeout_seconds: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self.stall_timeout_seconds = stall_timeout_seconds
        self.state = WorkerState.LOADING
        self.is_busy = False
        self._clock = clock
        self._last_pass = self._last_progress = clock()
        self._last_contact: float | None = None
        #: Thread -> its last sign of life. In the future for a thread that has announced a rest.
        self._signs: dict[str, float] = {}

    def passed(self, *, is_busy: bool) -> None:
        """Note a pass of the engine loop; `is_busy`: the engine has requests to work on."""
        self._last_pass = self._signs["engine"] = self._clock()
        self.is_busy = is_busy
        if not is_busy:
            self._last_progress = self._last_pass

    def loading(self) -> None:
        """Note that the engine thread loads a model, which may take minutes without a pass."""
        self.is_busy = False
        self._signs.pop("engine", None)

    def progressed(self) -> None:
        """Note that the engine has computed a step, or a layer of an encoder."""
        self._last_progress = self._clock()

    def beat(self, thread: str, *, rest_seconds: float = 0.0) -> None:
        """Note a sign of life; the thread's limit starts only after `rest_seconds`."""
        self._signs[thread] = self._clock() + rest_seconds

    def each(self, thread: str, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the items, and notes a sign of life of the thread before each of them.

        For passes with a call per item, which as a whole may take longer than the limit.
        """
        for item in items:
            self.beat(thread)
            yield item

    def during(self, thread: str, part: Callable[[], None]) -> None:
        """Run a thread's work. After its end no sign of life is expected from the thread."""
        try:
            part()
        finally:
            self._signs.pop(thread, None)

    def heard_from_redis(self) -> None:
        """Note that Redis answered one of our calls."""
        self._last_contact = self._clock()

    @property
    def seconds_since_pass(self) -> float:
        return self._clock() - self._last_pass

    @property
    def seconds_since_progress(self) -> float:
        return self._clock() - self._last_progress

    @property
    def seconds_since_contact(self) -> float | None:
        """None until Redis answered for the first time."""
        last = self._last_contact
        return None if last is None else self._clock() - last

    @property
    def is_stalled(self) -> bool:
        """Whether there is work but no step has finished within the stall timeout."""
        return self.is_busy and any(silence.thread == "engine" for silence in self.overdue)

    @property
    def overdue(self) -> tuple[Silence, ...]:
        """The threads that hang.

        For a busy engine the last progress counts: a step may take up to the stall timeout. The
        engine thread is not checked while it loads a model; the supervisor has to limit that time.
        """
        is_busy, now = self.is_busy, self._clock()
        silences = []
        for thread, since in self._signs.copy().items():
            if thread != "engine":
                silences.append(Silence(thread, since, THREAD_PASS_SECONDS))
            elif is_busy:
                silences.append(Silence(thread, self._last_progress, self.stall_timeout_seconds))
            else:
                silences.append(Silence(thread, since, LOOP_PASS_SECONDS))
        return tuple(silence for silence in silences if now - silence.since > silence.limit_seconds)

    @property
    def is_alive(self) -> bool:
        """Whether no thread hangs and none has died."""
        return self.state is not WorkerState.FAILED and not self.overdue

    def is_ready(self, *, contact_limit_seconds: float) -> bool:
        """Whether the worker is ready, no thread hangs, and Redis has answered recently."""
        contact = self.seconds_since_contact
        return (
            self.state is WorkerState.READY
            and self.is_alive
            and contact is not None
            and contact <= contact_limit_seconds
        )
