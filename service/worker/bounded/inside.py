"""What a bounded process does to itself: its ties to the parent, and its limits on time and memory.

Knows no work. The kernel bounds CPU time by a timer and memory by a limit, because a library counts
only a part of its own work and cannot be interrupted. What goes beyond a bound ends the process,
and the signal tells the parent which bound it was.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Added to the nice value of the parent, so that the engine is scheduled first.
NICE = 5
#: The highest `oom_score_adj`: when memory runs out, the kernel kills this process and not the
#: worker.
OOM_SCORE_ADJ = 1000
#: `prctl`'s option that asks for a signal at the death of the parent's thread.
PR_SET_PDEATHSIG = 1

_PAGE_BYTES = resource.getpagesize()


def set_up_process() -> None:
    """Tie this process to its parent: end with it, run at a lower priority, write no core file."""
    parent = os.getppid()
    # Signals to the process group are ignored: the parent decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _die_with(parent)
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


@contextmanager
def bounded(cpu_seconds: float, memory_bytes: int) -> Iterator[None]:
    """A context in which too much CPU time ends the process by SIGPROF, too much memory by SIGABRT.

    It bounds the CPU time of all threads together, and not wall-clock time, so that the verdict
    does not depend on how busy the machine is. The memory is what is mapped in addition. A library
    aborts by itself when it gets no memory; for a MemoryError of Python the caller must.
    """
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    mapped = _mapped_bytes()
    if mapped:
        limit = mapped + memory_bytes
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))


def resident_bytes() -> int:
    """Bytes of this process in physical memory; 0 without `/proc`."""
    return _statm()[1] * _PAGE_BYTES


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the call, which therefore sends no signal.
        os._exit(0)


def _mapped_bytes() -> int:
    """Bytes of memory mapped by this process; 0 without `/proc`."""
    return _statm()[0] * _PAGE_BYTES


def _statm() -> tuple[int, int]:
    try:
        mapped, resident = Path("/proc/self/statm").read_text().split()[:2]
    except OSError:
        return 0, 0
    return int(mapped), int(resident)
