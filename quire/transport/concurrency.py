"""How a thread does what concurrency_async.py has for an event loop.

A thread does one thing after the other, and other threads run beside it. So most of this does
nothing: it is here so that the code for threads can be generated from that for event loops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

_Item = TypeVar("_Item")
_Arguments = ParamSpec("_Arguments")

pause = time.sleep
lock = threading.Lock

#: The results of all calls; each is made when its turn has come.
all_of = list_of = list


@contextmanager
def if_free(lock: threading.Lock) -> Iterator[bool]:
    """A context that holds the lock if nobody else does, and tells whether. Waits for nobody."""
    # A look before a blocking call would not do: another thread may come between.
    is_ours = lock.acquire(blocking=False)
    try:
        yield is_ours
    finally:
        if is_ours:
            lock.release()


def limited(_number: int) -> AbstractContextManager[object]:
    """Limits nothing: whoever starts threads decides how many there are."""
    return nullcontext()


def heeding_cancels(result: _Item) -> _Item:
    """The result: nobody cancels a thread."""
    return result


def timeout(_seconds: float | None) -> AbstractContextManager[None]:
    """Limits nothing: a thread cannot stop a call. The socket's timeout ends it."""
    return nullcontext()


def aside(
    function: Callable[_Arguments, _Item],
    /,
    *arguments: _Arguments.args,
    **named: _Arguments.kwargs,
) -> _Item:
    """Calls the function here."""
    return function(*arguments, **named)


def in_turns(items: Iterator[_Item]) -> Iterator[list[_Item]]:
    """Each item in a list of its own, made when the caller comes to it."""
    return ([item] for item in items)
