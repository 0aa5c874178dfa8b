"""How many threads compute a step on a CPU: as many as really get a core. Knows no model.

The threads of a step wait for each other, many times in each layer. If another process runs on the
core of one of them, all the others stand still until the scheduler gives that core back. Two
threads beside one busy process are slower than one thread. So a step has fewer threads as soon as
its threads have lost so much time that fewer are faster. Some time later one more is tried. The
tokens are the same for any number of threads.
"""

import logging
from typing import Protocol

import torch

from engine.model.device.run_delays import RunDelays

#: Nanoseconds of computing after which a number of threads is judged, and while it is on trial.
WINDOW = 100_000_000
TRIAL_WINDOW = 20_000_000
#: Nanoseconds of computing between two looks at the delays.
LOOK_EVERY = 4_000_000
#: Nanoseconds of computing after which one more thread is tried, at least and at most.
SHORTEST_PAUSE = 1_000_000_000
LONGEST_PAUSE = 30_000_000_000
#: After a trial that failed, the pause is this many times its length: beside a process that stays,
#: trials cost a few percent.
PAUSE_PER_TRIAL = 32

logger = logging.getLogger(__name__)


class Delays(Protocol):
    """See `engine.model.device.run_delays.RunDelays`; nanoseconds."""

    def begin(self) -> None: ...
    def elapsed(self) -> int: ...
    def delayed(self) -> int: ...


class StepThreads:
    """Sets the number of threads that torch uses, and with it that of the C++ decoder.

    All calls of `adjust` come from the thread that computes the steps: torch applies the number to
    the operations of that thread.

    `count` is the number of threads of the next step.

    Args:
        most: the largest number of threads.
        delays: None for those of the thread that calls first; where the system does not count
            them, the number of threads never changes.
    """

    def __init__(self, most: int, delays: Delays | None = None) -> None:
        self.count = most
        self._most = most
        self._delays = delays
        self._is_trial = False
        self._begun = self._looked = self._next_trial = 0

    def adjust(self) -> None:
        """Choose the number of threads of the next step. To be called after each step."""
        if self._most <= 1:
            return
        try:
            self._adjust()
        except OSError as error:
            # Nothing is counted here, or no file can be opened any more. The step is computed.
            logger.warning("the number of threads stays as it is: %s", error)
            self._use(self._most)
            self._most = 1

    def _adjust(self) -> None:
        delays = self._delays = self._delays or RunDelays()
        now = delays.elapsed()
        if self._begun == 0 or torch.get_num_threads() != self.count:
            # The first step, or another runner of this process has changed the number.
            self.count = torch.get_num_threads()
            self._begin_window(delays, now)
        elif now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._judge(delays, now)

    def _judge(self, delays: Delays, now: int) -> None:
        elapsed, delayed = now - self._begun, delays.delayed()
        window = TRIAL_WINDOW if self._is_trial else WINDOW
        # While one of `count` threads has no core, all stand still: in `elapsed` they do count *
        # (elapsed - delayed) of work. One thread fewer, each on a core, does (count - 1) * elapsed.
        if self.count > 1 and self.count * delayed > max(elapsed, window):
            pause = min(PAUSE_PER_TRIAL * elapsed, LONGEST_PAUSE) if self._is_trial else 0
            self._next_trial = now + max(pause, SHORTEST_PAUSE)
            given_cores = self.count - -(-delayed // elapsed)
            self._use(max(1, min(given_cores, self.count - 1)))
            if not self._is_trial:
                self._tell()
            self._begin_window(delays, now)
        elif elapsed >= window:
            if self._is_trial:
                self._tell()
            self._begin_window(delays, now)
            if self.count < self._most and now >= self._next_trial:
                self._use(self.count + 1)
                self._is_trial = True

    def _use(self, count: int) -> None:
        self.count = count
        torch.set_num_threads(count)

    def _tell(self) -> None:
        logger.info("%d of %d threads of a step have a core", self.count, self._most)

    def _begin_window(self, delays: Delays, now: int) -> None:
        delays.begin()
        self._is_trial = False
        self._begun = self._looked = now
