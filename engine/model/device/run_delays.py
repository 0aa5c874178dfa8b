"""How long the computing threads waited for a core, as Linux counts it. Knows no model.

The numbers come from /proc/self/task/<thread>/schedstat: nanoseconds on a core, and nanoseconds in
which the thread was runnable but had no core (another thread had it, or the container's CPU quota
was used up).
"""

import os
import threading
from pathlib import Path

TASKS = Path("/proc/self/task")
#: Read size; larger than the file, which has three numbers.
READ_BYTES = 128


class RunDelays:
    """The delays of the thread that creates it, and of all threads that run no Python.

    The latter are the compute threads of torch and of the C++ kernels. Other Python threads, for
    instance the one that publishes tokens, may wait for a core without delaying a step.

    Raises:
        OSError: the system does not count delays.
    """

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._own = threading.get_native_id()
        self._files = {self._own: self._open(self._own)}
        self._delays: dict[int, int] = {}
        if self.elapsed() == 0:
            # A kernel built or started without these counters has the file, but with zeros only.
            raise OSError("the system has schedstat, but does not count in it")
        self.begin()

    def begin(self) -> None:
        """Restart the counts of delays at zero, for all threads that exist now."""
        python = {thread.native_id for thread in threading.enumerate()} - {self._own}
        found = {int(task.name) for task in self._tasks.iterdir()} - python
        for thread in self._files.keys() - found:
            os.close(self._files.pop(thread))
        for thread in found - self._files.keys():
            try:
                self._files[thread] = self._open(thread)
            except FileNotFoundError:
                continue  # The thread has ended.
        self._delays = {thread: self._read(thread)[1] for thread in self._files}

    def elapsed(self) -> int:
        """Nanoseconds in which the own thread computed or waited for a core, since it started."""
        computed, delayed = self._read(self._own)
        return computed + delayed

    def delayed(self) -> int:
        """Nanoseconds of waiting for a core since `begin`, summed over the threads."""
        return sum(self._read(thread)[1] - delay for thread, delay in self._delays.items())

    def _open(self, thread: int) -> int:
        return os.open(self._tasks / str(thread) / "schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, thread: int) -> tuple[int, int]:
        try:
            computed, delayed, _ = os.pread(self._files[thread], READ_BYTES, 0).split()
        except ProcessLookupError:
            return 0, self._delays.get(thread, 0)  # The thread has ended: no delay since `begin`.
        return int(computed), int(delayed)
