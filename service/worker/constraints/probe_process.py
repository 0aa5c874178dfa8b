"""The process that tries constraints for `probe`, which runs this module with `python -m`.

It reads one JSON document per line from its standard input and answers each with one line. The
first document has the tokenizer. Each later one is a constraint with its bounds. The kernel bounds
CPU time by a timer and memory by a limit, because the library counts only a part of its own work
and cannot be interrupted. A constraint beyond a bound ends this process, and the signal tells the
parent which bound it was. End of file, or the end of the parent's thread, ends it as well.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.worker.constraints.deep_stack import STACK_BYTES
from service.worker.constraints.grammars import CompiledGrammars
from service.worker.constraints.matching import shortened

#: Added to the nice value of the parent, so that the engine is scheduled first.
NICE = 5
#: The highest `oom_score_adj`: when memory runs out, the kernel kills this process and not the
#: worker.
OOM_SCORE_ADJ = 1000
#: `prctl`'s option that asks for a signal at the death of the parent's thread.
PR_SET_PDEATHSIG = 1

_MALLINFO2_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_PAGE_BYTES = resource.getpagesize()


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, with the fields in the order of its manual."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2_FIELDS]


def main() -> None:
    """Answer until the end of the input."""
    _set_up_process()
    # Standard output becomes standard error, so that output of a library cannot mix with answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    lines = iter(sys.stdin.buffer.readline, b"")
    for line in lines:
        try:
            grammars = _load_grammars(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent reports it; stderr is not read.
            answer(failed=shortened(f"{type(error).__name__}: {error}"))
            return
        answer(failed="")
        break
    heap_bytes = _heap_counter()
    before = _resident_bytes()
    for line in lines:
        job = json.loads(line)
        tried = _try(grammars, job, heap_bytes)
        # Freed memory may stay mapped, and the limit would not count it. A new process starts
        # without it.
        must_restart = _resident_bytes() - before > job["memory_bytes"] // 2
        answer(**tried, must_restart=must_restart)


def _set_up_process() -> None:
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


def _load_grammars(description: dict[str, Any]) -> CompiledGrammars:
    return CompiledGrammars(
        Tokenizer.from_str(description["tokenizer"]),
        vocab_size=description["vocab_size"],
        eos_token_ids=description["eos_token_ids"],
    )


def _try(
    grammars: CompiledGrammars, job: dict[str, Any], heap_bytes: Callable[[], int]
) -> dict[str, Any]:
    """The verdict on one constraint: a reason to refuse it or '', and the cost of compiling it."""
    value = tuple(job["value"]) if job["kind"] == "choice" else job["value"]
    wanted = Constraint(job["kind"], value, job["field"], job["is_compact"])
    refusal, num_bytes, cpu_seconds = "", 0, 0.0
    bytes_before, began = heap_bytes(), time.process_time()
    try:
        with _bounded(job["cpu_seconds"], job["memory_bytes"]):
            matcher = grammars.compile(wanted, is_shared=False)
        cpu_seconds = time.process_time() - began
        if job["is_new"]:
            with _bounded(job["cpu_seconds"], job["memory_bytes"]):
                failure = grammars.rehearse(wanted, matcher)
            refusal = failure.message if failure is not None else ""
        num_bytes = heap_bytes() - bytes_before
        del matcher
    except InvalidRequest as error:
        refusal = error.message
    except MemoryError:
        # Python's code reached the limit before the library did. End in the way the library does.
        os.abort()
    return {
        "refusal": refusal,
        "num_bytes": max(0, num_bytes),
        "cpu_seconds": cpu_seconds,
    }


@contextmanager
def _bounded(cpu_seconds: float, memory_bytes: int) -> Iterator[None]:
    """A context in which too much CPU time ends the process by SIGPROF, too much memory by SIGABRT.

    It bounds the CPU time of all threads together, and not wall-clock time, so that the verdict
    does not depend on how busy the machine is. The memory is what is mapped in addition, without
    the stack of the thread that compiles.
    """
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    mapped = _mapped_bytes()
    if mapped:
        limit = mapped + STACK_BYTES + memory_bytes
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the call, which therefore sends no signal.
        os._exit(0)


def _heap_counter() -> Callable[[], int]:
    """A function that returns the bytes of heap in use, or the resident bytes without glibc."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return _resident_bytes
    mallinfo2.restype = _Mallinfo2
    return lambda: int((found := mallinfo2()).uordblks + found.hblkhd)


def _mapped_bytes() -> int:
    """Bytes of memory mapped by this process; 0 without `/proc`."""
    return _statm()[0] * _PAGE_BYTES


def _resident_bytes() -> int:
    """Bytes of this process in physical memory; 0 without `/proc`."""
    return _statm()[1] * _PAGE_BYTES


def _statm() -> tuple[int, int]:
    try:
        mapped, resident = Path("/proc/self/statm").read_text().split()[:2]
    except OSError:
        return 0, 0
    return int(mapped), int(resident)


if __name__ == "__main__":
    main()
