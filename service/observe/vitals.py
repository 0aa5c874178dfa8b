"""The worker's state, signs of life of its threads, progress, and contact with Redis.

Each value is written by the thread it is about, and read by health checks, heartbeat and metrics.
Every write is one assignment of a plain value, so readers need no lock; values read together may be
of slightly different moments.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from time import monotonic
from typing import NamedTuple, TypeVar

#: An idle engine thread that makes no turn for so long counts as hung.
LOOP_TURN_SECONDS = 30.0
#: The same for any other thread. One call to a Redis that is away may take most of it: several
#: sentinels are tried, and the resolver of their names may be away as well.
THREAD_TURN_SECONDS = 180.0

#: The threads that show signs of life. Those of several shards have names like `intake-0`.
THREADS = ("main", "engine", "intake", "compiler", "publisher", "heartbeat", "keeper")

_Item = TypeVar("_Item")


class WorkerState(StrEnum):
    """The worker's life, in this order; FAILED can follow any of the others."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Silence(NamedTuple):
    """A thread, its last sign of life (a reading of the clock), and how long it may be silent."""

    thread: str
    since: float
    limit_seconds: float


class Vitals:
    """See the module. All times are readings of `clock`, in seconds."""

    def __init__(
        self, *, stall_timeout_seconds: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self.stall_timeout_seconds = stall_timeout_seconds
        self.state = WorkerState.LOADING
        self.is_busy = False
        self._clock = clock
        self._last_turn = self._last_progress = clock()
        self._last_contact: float | None = None
        #: The last sign of life by thread; in the future for a thread that announced a rest.
        self._signs: dict[str, float] = {}

    def turned(self, *, is_busy: bool) -> None:
        """Note a turn of the engine loop; `is_busy`: the engine has requests to work on."""
        self._last_turn = self._signs["engine"] = self._clock()
        self.is_busy = is_busy
        if not is_busy:
            self._last_progress = self._last_turn

    def progressed(self) -> None:
        """Note that the engine finished a step that computed something."""
        self._last_progress = self._clock()

    def beat(self, thread: str, *, rest_seconds: float = 0.0) -> None:
        """A thread shows a sign of life; the next is due only after `rest_seconds` of rest."""
        self._signs[thread] = self._clock() + rest_seconds

    def each(self, thread: str, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, with a sign of life before each; for turns that make many calls."""
        for item in items:
            self.beat(thread)
            yield item

    def during(self, thread: str, part: Callable[[], None]) -> None:
        """Run a thread's work. Once it has ended, no sign of life is expected of the thread."""
        try:
            part()
        finally:
            self._signs.pop(thread, None)

    def heard_from_redis(self) -> None:
        """Note that Redis answered one of our calls."""
        self._last_contact = self._clock()

    @property
    def seconds_since_turn(self) -> float:
        return self._clock() - self._last_turn

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

        A busy engine is judged by its last progress: a step may take up to the stall timeout. While
        a model is loaded the engine thread is not watched; whoever starts the process limits that.
        """
        is_busy, now = self.is_busy, self._clock()
        silences = []
        for thread, since in self._signs.copy().items():
            if thread != "engine":
                silences.append(Silence(thread, since, THREAD_TURN_SECONDS))
            elif is_busy:
                silences.append(Silence(thread, self._last_progress, self.stall_timeout_seconds))
            else:
                silences.append(Silence(thread, since, LOOP_TURN_SECONDS))
        return tuple(silence for silence in silences if now - silence.since > silence.limit_seconds)

    @property
    def is_alive(self) -> bool:
        """Whether no thread hangs and none has died."""
        return self.state is not WorkerState.FAILED and not self.overdue

    def is_ready(self, *, contact_limit_seconds: float) -> bool:
        """Whether the model is loaded, nothing drains or hangs, and Redis answered recently."""
        contact = self.seconds_since_contact
        return (
            self.state is WorkerState.READY
            and self.is_alive
            and contact is not None
            and contact <= contact_limit_seconds
        )
