"""The process that tries constraints for `probe`, which runs this module with `python -m`.

It reads one JSON document per line from its standard input and answers each with one line. The
first document has the tokenizer. Each later one is a constraint with its bounds. A constraint
beyond a bound ends this process, see `bounded`. End of file, or the end of the parent's thread,
ends it as well.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.worker.bounded.inside import bounded, resident_bytes, set_up_process
from service.worker.constraints.deep_stack import STACK_BYTES
from service.worker.constraints.grammars import CompiledGrammars
from service.worker.constraints.matching import shortened

_MALLINFO2_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, with the fields in the order of its manual."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2_FIELDS]


def main() -> None:
    """Answer until the end of the input."""
    set_up_process()
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
    before = resident_bytes()
    for line in lines:
        job = json.loads(line)
        tried = _try(grammars, job, heap_bytes)
        # Freed memory may stay mapped, and the limit would not count it. A new process starts
        # without it.
        must_restart = resident_bytes() - before > job["memory_bytes"] // 2
        answer(**tried, must_restart=must_restart)


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
    # The stack of the thread that compiles does not count.
    memory_bytes = job["memory_bytes"] + STACK_BYTES
    refusal, num_bytes, cpu_seconds = "", 0, 0.0
    bytes_before, began = heap_bytes(), time.process_time()
    try:
        with bounded(job["cpu_seconds"], memory_bytes):
            matcher = grammars.compile(wanted, is_shared=False)
        cpu_seconds = time.process_time() - began
        if job["is_new"]:
            with bounded(job["cpu_seconds"], memory_bytes):
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


def _heap_counter() -> Callable[[], int]:
    """A function that returns the bytes of heap in use, or the resident bytes without glibc."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return resident_bytes
    mallinfo2.restype = _Mallinfo2
    return lambda: int((found := mallinfo2()).uordblks + found.hblkhd)


if __name__ == "__main__":
    main()
