"""How long the threads that compute had no core, as Linux counts it. Knows no model.

The numbers come from /proc/self/task/<thread>/schedstat: nanoseconds on a core, and nanoseconds in
which the thread could run but another one had its core (or the container's CPU quota was used up).
"""

import os
import threading
from pathlib import Path

TASKS = Path("/proc/self/task")
#: More than the three numbers of the file take.
READ_BYTES = 128


class RunDelays:
    """The thread that makes it, and the threads of the process that run no Python.

    The latter are those that torch and the C++ kernels compute with. Another thread of Python, for
    instance one that publishes tokens, may wait for a core without delaying a step.

    Raises:
        OSError: the system does not count this.
    """

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._own = threading.get_native_id()
        self._files = {self._own: self._open(self._own)}
        self._delays: dict[int, int] = {}
        if self.elapsed() == 0:
            # A kernel that was built or started without these counters has the file, full of zeros.
            raise OSError("the system has schedstat, and counts nothing there")
        self.begin()

    def begin(self) -> None:
        """Count the delays of all threads that there are now from zero on."""
        python = {thread.native_id for thread in threading.enumerate()} - {self._own}
        found = {int(task.name) for task in self._tasks.iterdir()} - python
        for thread in self._files.keys() - found:
            os.close(self._files.pop(thread))
        for thread in found - self._files.keys():
            try:
                self._files[thread] = self._open(thread)
            except FileNotFoundError:
                continue  # It has ended meanwhile.
        self._delays = {thread: self._read(thread)[1] for thread in self._files}

    def elapsed(self) -> int:
        """Nanoseconds that the own thread has computed or waited for a core in its whole life."""
        computed, delayed = self._read(self._own)
        return computed + delayed

    def delayed(self) -> int:
        """Nanoseconds without a core since `begin`, in sum over the threads."""
        return sum(self._read(thread)[1] - delay for thread, delay in self._delays.items())

    def _open(self, thread: int) -> int:
        return os.open(self._tasks / str(thread) / "schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, thread: int) -> tuple[int, int]:
        try:
            computed, delayed, _ = os.pread(self._files[thread], READ_BYTES, 0).split()
        except ProcessLookupError:
            return 0, self._delays.get(thread, 0)  # It has ended: no delay since `begin`.
        return int(computed), int(delayed)
