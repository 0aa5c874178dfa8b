"""Adjusts how many threads compute a step on a CPU: as many as really get a core. Knows no model.

The threads of a step wait for each other at many barriers in each layer. If another process runs on
the core of one thread, all others wait until the scheduler gives that core back. On two cores with
one other busy process, two threads are slower than one. So the number of threads is reduced as soon
as the delays show that fewer threads would be faster. Some time later one more thread is tried. The
tokens are the same for any number of threads.
"""

import logging
from typing import Protocol

import torch

from engine.model.device.run_delays import RunDelays

#: Nanoseconds of computing after which the delays are evaluated; a shorter window during a trial.
WINDOW = 100_000_000
TRIAL_WINDOW = 20_000_000
#: Nanoseconds of computing between two readings of the delays.
READ_EVERY = 4_000_000
#: Nanoseconds of computing before one more thread is tried. The first pause is short, because often
#: it is a burst of work that takes a core. The others are the least and most after a failed trial.
FIRST_PAUSE = 100_000_000
SHORTEST_PAUSE = 1_000_000_000
LONGEST_PAUSE = 30_000_000_000
#: After a failed trial, the pause is this many times the length of the trial: so trials cost a few
#: per cent while another process keeps its core.
PAUSE_PER_TRIAL = 32

logger = logging.getLogger(__name__)


class Delays(Protocol):
    """As `engine.model.device.run_delays.RunDelays`; all values in nanoseconds."""

    def begin(self) -> None: ...
    def elapsed(self) -> int: ...
    def delayed(self) -> int: ...


class StepThreads:
    """Sets the number of threads of torch, which is also that of the C++ decoder.

    `adjust` must be called by the thread that computes the steps: torch applies the number to the
    operations of that thread.

    `count` is the number of threads of the next step.

    Args:
        most: the largest number of threads.
        delays: by default those of the thread that calls `adjust` first. If the system does not
            count them, the number of threads never changes.
    """

    def __init__(self, most: int, delays: Delays | None = None) -> None:
        self.count = most
        self._most = most
        self._delays = delays
        self._is_trial = False
        self._begun = self._last_read = self._next_trial = self._last_trial = 0

    def adjust(self) -> None:
        """Choose the number of threads of the next step. Call it after each step."""
        if self._most <= 1:
            return
        try:
            self._adjust()
        except OSError as error:
            # The system counts no delays, or has no free file descriptor. Steps do not need them.
            logger.warning("the number of threads is no longer adjusted: %s", error)
            self._use(self._most)
            self._most = 1

    def _adjust(self) -> None:
        delays = self._delays = self._delays or RunDelays()
        now = delays.elapsed()
        if self._begun == 0 or torch.get_num_threads() != self.count:
            # The first step, or another runner of this process has changed the number.
            self.count = torch.get_num_threads()
            self._begin_window(delays, now)
        elif now - self._last_read >= READ_EVERY:
            self._last_read = now
            self._evaluate(delays, now)

    def _evaluate(self, delays: Delays, now: int) -> None:
        elapsed, delayed = now - self._begun, delays.delayed()
        window = TRIAL_WINDOW if self._is_trial else WINDOW
        # While one of `count` threads has no core, all wait: in `elapsed` they do an amount of work
        # of count * (elapsed - delayed). One thread fewer, without delays, does (count - 1) *
        # elapsed.
        if self.count > 1 and self.count * delayed > max(elapsed, window):
            self._next_trial = now + self._pause(now, elapsed)
            given_cores = self.count - -(-delayed // elapsed)
            self._use(max(1, min(given_cores, self.count - 1)))
            if not self._is_trial:
                self._log_count()
            self._begin_window(delays, now)
        elif elapsed >= window:
            if self._is_trial:
                self._log_count()
            self._begin_window(delays, now)
            if self.count < self._most and now >= self._next_trial:
                self._use(self.count + 1)
                self._is_trial = True
                self._last_trial = now

    def _pause(self, now: int, elapsed: int) -> int:
        """Nanoseconds until the next trial, after `elapsed` of them with too many threads."""
        if self._is_trial:
            return max(SHORTEST_PAUSE, min(PAUSE_PER_TRIAL * elapsed, LONGEST_PAUSE))
        # A thread that was added a moment ago was added in error: its trial saw too little.
        added_lately = self._last_trial and now - self._last_trial < SHORTEST_PAUSE
        return SHORTEST_PAUSE if added_lately else FIRST_PAUSE

    def _use(self, count: int) -> None:
        self.count = count
        torch.set_num_threads(count)

    def _log_count(self) -> None:
        logger.info("%d of %d threads of a step have a core", self.count, self._most)

    def _begin_window(self, delays: Delays, now: int) -> None:
        delays.begin()
        self._is_trial = False
        self._begun = self._last_read = now
