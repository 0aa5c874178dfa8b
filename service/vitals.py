"""What the worker knows about its own life: state, engine progress, contact with Redis.

Written by the thread that knows, read by health checks, heartbeat and metrics. Every write is one
assignment of a plain value, so readers need no lock; they may see values of neighbouring moments.
"""

from collections.abc import Callable
from enum import StrEnum
from time import monotonic

#: An idle engine thread that has not gone round for so long counts as dead.
LOOP_TURN_SECONDS = 30.0


class WorkerState(StrEnum):
    """The worker's life, in this order; FAILED can follow any of the others."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Vitals:
    """The worker's pulse. All times are readings of `clock`, in seconds."""

    def __init__(
        self, *, stall_timeout_seconds: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self.stall_timeout_seconds = stall_timeout_seconds
        self.state = WorkerState.LOADING
        self.is_busy = False
        self._clock = clock
        self._last_turn = self._last_progress = clock()
        self._last_contact: float | None = None

    def turned(self, *, is_busy: bool) -> None:
        """The engine loop goes round; `is_busy` says that the engine has requests to work on."""
        self._last_turn = self._clock()
        self.is_busy = is_busy
        if not is_busy:
            self._last_progress = self._last_turn

    def progressed(self) -> None:
        """The engine finished a step that computed something."""
        self._last_progress = self._clock()

    def heard_from_redis(self) -> None:
        """Redis answered one of our calls."""
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
        """There is work, and no step made progress within the stall timeout."""
        return self.is_busy and self.seconds_since_progress > self.stall_timeout_seconds

    @property
    def is_alive(self) -> bool:
        """The engine thread does what it is there for.

        A step under way may take up to the stall timeout. Loading a model makes no turns and has no
        limit but the one of whoever starts the process.
        """
        if self.state in (WorkerState.LOADING, WorkerState.FAILED):
            return self.state is WorkerState.LOADING
        if self.is_busy:
            return not self.is_stalled
        return self.seconds_since_turn <= LOOP_TURN_SECONDS

    def is_ready(self, *, contact_limit_seconds: float) -> bool:
        """Model loaded, not draining, alive, and Redis answered recently."""
        contact = self.seconds_since_contact
        return (
            self.state is WorkerState.READY
            and self.is_alive
            and contact is not None
            and contact <= contact_limit_seconds
        )
