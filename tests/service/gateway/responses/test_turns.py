"""Others run while many events of a response are made, sent or not."""

import asyncio
from collections.abc import Iterator

from service.gateway.responses import streaming
from service.gateway.responses.streaming import joined_in_turns
from service.gateway.streaming import JOINED_BYTES


async def turns_of_others(*groups: list[bytes]) -> tuple[bytes, list[int]]:
    """What is joined, and how often others had run when each part was made."""
    num_turns, seen = 0, []

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    def parts_of(group: list[bytes]) -> Iterator[bytes]:
        for part in group:
            seen.append(num_turns)
            yield part

    running = asyncio.create_task(other())
    bodies = [body async for body in joined_in_turns(map(parts_of, groups))]
    running.cancel()
    return b"".join(bodies), seen


def test_others_run_after_each_body():
    large = b"x" * JOINED_BYTES
    told, seen = asyncio.run(turns_of_others([large, large, large]))
    assert told == 3 * large
    assert seen == [0, 1, 2]


def test_small_events_are_joined_in_order():
    told, seen = asyncio.run(turns_of_others([b"a", b"b"], [b"c"]))
    assert (told, seen) == (b"abc", [0, 0, 0])


def test_others_run_while_events_are_made_that_the_caller_has(monkeypatch):
    monkeypatch.setattr(streaming, "TURN_SECONDS", 0.0)
    told, seen = asyncio.run(turns_of_others([b""], [b""], [b""]))
    assert told == b""
    assert seen == [0, 1, 2]
