"""Runs one call on a thread with a deep stack. Knows nothing of what is called."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread, stack_size
from typing import TypeVar

#: Stack size of the thread that compiles. The library resolves names recursively, the 64 KiB of a
#: constraint have room for thousands of them, and an overflow ends the process. The worst case
#: found needed a quarter of this. Only what is touched takes memory, until the thread ends.
STACK_BYTES = 1 << 28

#: Held while the stack size for new threads, which is global, is changed.
_STACK_SIZE = Lock()

_Result = TypeVar("_Result")


def on_deep_stack(call: Callable[[], _Result]) -> _Result:
    """What `call` returns or raises, from a thread of its own with STACK_BYTES of stack."""
    found: Future[_Result] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for.
            found.set_exception(error)

    thread = Thread(target=run, name="compile")
    with _STACK_SIZE:
        # A thread that another one starts meanwhile gets as much, of which it will touch little.
        before = stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            stack_size(before)
    return found.result()
