"""Waits for what a server or another thread does. Only failing tests wait for long."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

PATIENCE_SECONDS = 40.0


def eventually(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; errors of a server on its way count as not yet."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError("it did not come about")


class Reading:
    """Calls `read` in a thread of its own; `result` is what it returned, or the error it raised."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(PATIENCE_SECONDS)
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._read())
        except Exception as error:  # noqa: BLE001 - it is what the tests are about.
            self._found.append(error)
