"""I15, as a witness sees it: the turns of a session run in order, and never two at once.

It keeps an order of its own, in which the server queued the turns, so that it does not depend on
the numbers that the scripts give them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.wire.output import State
from tests.simulation.system.redis_data import Hash, Value

_TERMINAL = {str(state).encode() for state in State if state.is_terminal}
_RUNNING = str(State.RUNNING).encode()


@dataclass(eq=False)
class Turns:
    """The turns in the values of a server, whose records have keys that begin with `prefix`."""

    prefix: bytes
    #: Request -> the number that the scripts gave it, and its place in our order.
    _order: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    _places: Iterator[int] = field(default_factory=itertools.count)

    def queued(self, values: dict[bytes, Value], request_id: bytes) -> None:
        """A submit or a requeue ran: if it made a turn, that is the last of its session."""
        record = values.get(self.prefix + request_id)
        number = record.get(b"turn") if isinstance(record, Hash) else None
        if number is not None and self._order.get(request_id, (b"", 0))[0] != number:
            self._order[request_id] = number, next(self._places)

    def forget(self, values: dict[bytes, Value]) -> None:
        """The server lost its tail: turns that are not in it may be queued again, in any order."""
        kept = {
            request_id: (number, place)
            for request_id, (number, place) in self._order.items()
            if isinstance(record := values.get(self.prefix + request_id), Hash)
            and record.get(b"turn") == number
        }
        self._order.clear()
        self._order.update(kept)

    def broken_by(self, values: dict[bytes, Value], request_id: bytes) -> list[str]:
        """What is wrong with a claim of this request that was granted, as sentences."""
        broken = []
        for other, state in self._others(values, request_id):
            if state == _RUNNING:
                broken.append(f"I15: the turns {request_id!r} and {other!r} run at once")
            elif state not in _TERMINAL and self._is_before(other, request_id):
                broken.append(f"I15: {request_id!r} runs before the {state!r} turn {other!r}")
        return broken

    def follows_another(self, values: dict[bytes, Value], request_id: bytes) -> bool:
        """Whether an earlier turn of the session of this request has ended."""
        return any(
            state in _TERMINAL and self._is_before(other, request_id)
            for other, state in self._others(values, request_id)
        )

    def _others(
        self, values: dict[bytes, Value], request_id: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        """The other turns of the session of a request, with their states."""
        own = values.get(self.prefix + request_id)
        if not isinstance(own, Hash) or b"session" not in own:
            return
        for key, record in values.items():
            if not key.startswith(self.prefix) or not isinstance(record, Hash) or record is own:
                continue
            if all(record.get(name) == own[name] for name in (b"session", b"tenant")):
                yield key.removeprefix(self.prefix), record[b"state"]

    def _is_before(self, first: bytes, second: bytes) -> bool:
        """False if the order is not known any more."""
        places = [self._order[name][1] for name in (first, second) if name in self._order]
        return len(places) == 2 and places[0] < places[1]
