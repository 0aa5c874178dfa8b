"""The process that tries constraints for `probe`: `python -m service.constraints.probe_process`.

It reads one JSON document per line from its standard input and answers each with a line. The first
has the tokenizer; each other one is a constraint with what it may cost. Time is bounded by a timer
of the kernel and memory by a limit of the kernel, because the library counts only a part of its own
work and cannot be interrupted: a constraint beyond a bound ends this process, and its parent knows
why by the signal. End of file, or the death of the parent's thread, ends it as well.
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
from service.constraints.deep_stack import STACK_BYTES
from service.constraints.grammars import CompiledGrammars
from service.constraints.matching import shortened

#: Steps that this process' nice value is above its parent's: the engine comes first.
NICE = 5
#: The kernel's value for the most welcome victim when memory runs out: it takes this process then,
#: and not the worker.
FIRST_VICTIM = 1000
#: `prctl`'s option that asks for a signal at the death of the parent's thread.
PR_SET_PDEATHSIG = 1

_MALLINFO2_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_PAGE_BYTES = resource.getpagesize()


class _Mallinfo2(ctypes.Structure):
    """What glibc knows of its heaps, as its manual lists it."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2_FIELDS]


def main() -> None:
    """Answer until the end of the input."""
    _get_ready()
    # Whatever a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    lines = iter(sys.stdin.buffer.readline, b"")
    for line in lines:
        try:
            grammars = _grammars_of(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent can tell of it; nobody reads here.
            answer(failed=shortened(f"{type(error).__name__}: {error}"))
            return
        answer(failed="")
        break
    heap_bytes = _heap_meter()
    before = _resident_bytes()
    for line in lines:
        job = json.loads(line)
        tried = _tried(grammars, job, heap_bytes)
        # Freed memory may stay with this process; from here on a new one is cheaper to bound.
        worn = _resident_bytes() - before > job["memory_bytes"] // 2
        answer(**tried, worn=worn)


def _get_ready() -> None:
    """Make this process end with its parent, give way to it, and leave no core file."""
    parent = os.getppid()
    # The parent decides when this process ends, whoever signals the whole group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _die_with(parent)
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_VICTIM))


def _grammars_of(told: dict[str, Any]) -> CompiledGrammars:
    return CompiledGrammars(
        Tokenizer.from_str(told["tokenizer"]),
        vocab_size=told["vocab_size"],
        eos_token_ids=told["eos_token_ids"],
    )


def _tried(
    grammars: CompiledGrammars, job: dict[str, Any], heap_bytes: Callable[[], int]
) -> dict[str, Any]:
    """What came of compiling one constraint: a reason to refuse it or '', and what it cost."""
    value = tuple(job["value"]) if job["kind"] == "choice" else job["value"]
    wanted = Constraint(job["kind"], value, job["field"])
    refusal, held, began = "", heap_bytes(), time.process_time()
    try:
        with _bounded(job["cpu_seconds"], job["memory_bytes"]):
            matcher = grammars.compile(wanted)
        held = heap_bytes() - held
        del matcher
    except InvalidRequest as error:
        refusal, held = error.message, 0
    except MemoryError:
        # Python's own code has met the limit sooner than the library: as if that had.
        os.abort()
    return {
        "refusal": refusal,
        "num_bytes": max(0, held),
        "cpu_seconds": time.process_time() - began,
    }


@contextmanager
def _bounded(cpu_seconds: float, memory_bytes: int) -> Iterator[None]:
    """Within it, more CPU time ends the process by SIGPROF, and more memory by SIGABRT.

    CPU time of all threads, so that a busy machine refuses nothing. The memory is what is mapped in
    addition, without the stack of the thread that compiles.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    mapped = _mapped_bytes()
    if mapped:
        limit = mapped + STACK_BYTES + memory_bytes
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It died before the call.
        os._exit(0)


def _heap_meter() -> Callable[[], int]:
    """A function that says how much heap is in use: by glibc, else what is resident."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return _resident_bytes
    ask.restype = _Mallinfo2
    return lambda: int((found := ask()).uordblks + found.hblkhd)


def _mapped_bytes() -> int:
    """Memory mapped by this process; 0 where the system does not say."""
    return _statm()[0] * _PAGE_BYTES


def _resident_bytes() -> int:
    """Memory of this process that is in use; 0 where the system does not say."""
    return _statm()[1] * _PAGE_BYTES


def _statm() -> tuple[int, int]:
    try:
        mapped, resident = Path("/proc/self/statm").read_text().split()[:2]
    except OSError:
        return 0, 0
    return int(mapped), int(resident)


if __name__ == "__main__":
    main()
