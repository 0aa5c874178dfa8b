"""The clock of a queue: that of Redis. Deadlines are times on it."""

from __future__ import annotations

from quire.transport.procedure import Procedure, RoundTrip, command


def ms_of(time: tuple[int, int]) -> int:
    """Unix milliseconds of what TIME answers: seconds and microseconds."""
    seconds, microseconds = time
    return seconds * 1000 + microseconds // 1000


def now_ms() -> Procedure[int]:
    """See `Side.now_ms`."""
    (time,) = yield RoundTrip((command("time"),))
    return ms_of(time)
