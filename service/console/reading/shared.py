"""Runs the reads of all pages on a few threads, and lets pages that ask for the same share one."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

_Result = TypeVar("_Result")

#: Reads that run at the same time; further ones wait.
NUM_THREADS = 4

#: The most results that are kept.
MAX_KEPT = 256


@dataclass(frozen=True, slots=True)
class _Kept:
    task: "asyncio.Future[Any]"
    asked_at: float


class SharedReads:
    """For one event loop. A result is shared for `fresh_seconds`."""

    def __init__(self, *, fresh_seconds: float) -> None:
        self._fresh_seconds = fresh_seconds
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read")
        self._kept: dict[Hashable, _Kept] = {}

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """The result of a call on one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def share(self, key: Hashable, read: Callable[[], _Result]) -> _Result:
        """The result of `read`, or of an equal read that began a moment ago."""
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(key)
        if kept is None or now - kept.asked_at > self._fresh_seconds:
            self._forget(now)
            kept = _Kept(asyncio.ensure_future(self.run(read)), now)
            # Otherwise asyncio would warn of an error that no page has waited for.
            kept.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._kept[key] = kept
        # A reader that goes away must not take the result from the others.
        result: _Result = await asyncio.shield(kept.task)
        return result

    def forget(self) -> None:
        """Share no earlier result any more: something was changed."""
        self._kept.clear()

    def close(self) -> None:
        """Start no more reads; does not wait for those that run."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget(self, now: float) -> None:
        stale = [k for k, one in self._kept.items() if now - one.asked_at > self._fresh_seconds]
        for key in stale:
            del self._kept[key]
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
