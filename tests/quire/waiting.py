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


def blocked(connection: redis.Redis) -> set[str]:
    """The ids of the clients that wait for news."""
    return {one["id"] for one in connection.client_list() if "b" in one["flags"]}


class Clock:
    """The clock of waits; a test puts it forward, so that a timeout is over when the test says so.

    A timeout in real time is either long, or over before a busy machine has come to what is tested.
    """

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Reading:
    """Calls `read` in a thread of its own; `result` is what it returned, or the error it raised."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return bool(self._found)

    def result(self) -> Any:
        self._thread.join(PATIENCE_SECONDS)
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._read())
        except Exception as error:  # noqa: BLE001 - it is what the tests are about.
            self._found.append(error)
