"""One thread for each node of a cluster, so that a node that does not answer delays no other.

Knows no Redis: work is named by its node. Work for a node that is busy waits, and is done together
with what comes meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, TypeVar

_Work = TypeVar("_Work")


class Lanes(Generic[_Work]):
    """Calls `do` with lists of work, for each node in a thread of its own.

    An exception of `do` is raised by the next `hand` or `wait`.
    """

    def __init__(self, do: Callable[[Sequence[_Work]], None]) -> None:
        self._do = do
        # Guards all attributes below; notified when work is added or done.
        self._changed = threading.Condition()
        self._waiting: dict[str, list[_Work]] = {}
        self._busy: set[str] = set()
        self._threads: set[str] = set()
        self._error: BaseException | None = None
        self._is_closing = False

    def hand(self, node: str, work: Sequence[_Work]) -> None:
        """Adds work for a node, and returns at once."""
        with self._changed:
            self._raise_error()
            self._waiting.setdefault(node, []).extend(work)
            if node not in self._threads:
                self._threads.add(node)
                thread = threading.Thread(
                    target=self._run, args=(node,), name=f"publisher-{node}", daemon=True
                )
                thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Returns when all work is done, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle or self._error is not None, seconds)
            self._raise_error()

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        with self._changed:
            return self._is_idle

    def close(self, *, seconds: float) -> None:
        """Ends the threads when their work is done; waits for that up to `seconds`."""
        give_up = monotonic() + seconds
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._threads, max(0.0, give_up - monotonic()))

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._busy

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, node: str) -> None:
        try:
            while (work := self._next(node)) is not None:
                self._do(work)
        except BaseException as error:  # noqa: BLE001 - `hand` and `wait` raise it.
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                self._busy.discard(node)
                self._threads.discard(node)
                self._changed.notify_all()

    def _next(self, node: str) -> list[_Work] | None:
        with self._changed:
            self._busy.discard(node)
            self._changed.notify_all()
            self._changed.wait_for(lambda: node in self._waiting or self._is_closing)
            work = self._waiting.pop(node, None)
            if work is not None:
                self._busy.add(node)
            return work
