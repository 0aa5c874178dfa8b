"""Runs one call on a thread with a deep stack. Knows nothing about the call."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread, stack_size
from typing import TypeVar

#: Stack size of the thread that compiles, in bytes. The library resolves names recursively, a
#: constraint can contain thousands of names, and a stack overflow ends the process. The worst case
#: found needed a quarter of this size. Only used pages take memory, until the thread
#: ends.
STACK_BYTES = 1 << 28

#: Held while the stack size for new threads is changed, which is a global setting.
_STACK_SIZE = Lock()

_Result = TypeVar("_Result")


def on_deep_stack(call: Callable[[], _Result]) -> _Result:
    """The result of `call` on a thread with STACK_BYTES of stack. Raises what `call` raises."""
    found: Future[_Result] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by `found.result()`.
            found.set_exception(error)

    thread = Thread(target=run, name="compile")
    with _STACK_SIZE:
        # A thread that is started elsewhere meanwhile gets the same size, but uses little of it.
        before = stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            stack_size(before)
    return found.result()
