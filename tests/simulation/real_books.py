"""Reads the books of a shard on a server, in the terms of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.keys import Keys
from quire.wire.output import Completion
from quire.wire.sizes import estimated_tokens
from tests.quire.builders import make_request
from tests.simulation.model_state import Books, Told
from tests.simulation.naming import reason_of

GROUP_NAME, TENANT = "g", "default"


def ask_books(pipeline: Any, keys: Keys, *, names: Sequence[str]) -> Callable[..., Books]:
    """Asks for the books of the requests `names`; returns what makes them of the answers."""
    counts, members, ends = keys.of_group(GROUP_NAME)
    pipeline.hgetall(keys.open)
    pipeline.hgetall(keys.counts)
    pipeline.hgetall(counts)
    pipeline.smembers(members)
    pipeline.xrange(ends)

    def index_of(name: bytes) -> int:
        return names.index(name.decode())

    def books(
        open_: dict[bytes, bytes],
        totals: dict[bytes, bytes],
        group: dict[bytes, bytes],
        left: set[bytes],
        ended: list[Any],
    ) -> Books:
        states = {index_of(name): text.split()[0].decode() for name, text in open_.items()}
        size = estimated_tokens(make_request())
        assert int(totals.get(b"tokens", 0)) % size == 0, "the tokens of a part of a request"
        return Books(
            open=tuple(states.get(index, "") for index in range(len(names))),
            waiting=int(totals.get(b"tokens", 0)) // size,
            unfinished=int(totals.get(f"tenant:{TENANT}".encode(), 0)),
            group=tuple(sorted((s.decode(), int(n)) for s, n in group.items() if int(n))),
            members=tuple(sorted(index_of(name) for name in left)),
            ended=tuple((index_of(f[b"id"]), f[b"state"].decode()) for _, f in ended),
        )

    return books


def told_of(fields: Mapping[bytes, bytes], names: Sequence[str], *, is_old: bool) -> Told:
    """An entry of the ends of one of the requests `names`."""
    completion = Completion.decode(fields[b"done"], request_id="")
    assert fields[b"state"].decode() == str(completion.state)
    assert (fields[b"tenant"], fields[b"priority"]) == (TENANT.encode(), b"1")
    index = names.index(fields[b"id"].decode())
    return Told(index, int(fields[b"tokens"]), reason_of(completion), is_old)
