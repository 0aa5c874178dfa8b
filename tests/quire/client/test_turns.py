"""Long works in one loop: how many of them have a turn before the loop comes round again."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import pytest

from quire import Client, Completion, ProtocolError, TokenChunk
from quire.client.client_async import AsyncClient
from quire.client.handle_async import completion_of
from quire.transport import turns
from quire.transport.turns import Turn
from tests.quire.builders import make_item, submit_and_claim, token_at
from tests.quire.loop_face import async_twin

NUM_ENTRIES = 20


@pytest.fixture(autouse=True)
def over_at_once(monkeypatch):
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)


async def work(steps: list[str], name: str, number: int) -> None:
    async with Turn() as turn:
        for _ in range(number):
            steps.append(name)
            assert turn.is_over
            await turn.next()


def test_in_one_round_of_the_loop_one_of_several_works_has_its_turn():
    async def most_in_a_round() -> tuple[int, list[str]]:
        steps = list[str]()
        working = asyncio.gather(*(work(steps, name, 10) for name in "abc"))
        # In their first turns they know nothing of one another.
        await asyncio.sleep(0)
        most, before = 0, len(steps)
        while not working.done():
            await asyncio.sleep(0)
            most, before = max(most, len(steps) - before), len(steps)
        return most, steps

    most, steps = asyncio.run(most_in_a_round())
    assert most == 1
    # And it is everybody's in its order.
    assert "".join(steps) == "abc" * 10


def test_a_work_that_is_cancelled_or_fails_gives_its_turn_back():
    async def live() -> None:
        async def fail(steps: list[str]) -> None:
            async with Turn() as turn:
                await turn.next()
                steps.append("failed")
                raise ValueError

        steps = list[str]()
        failing = asyncio.create_task(fail(steps))
        cancelled = asyncio.create_task(work(steps, "cancelled", 1000))
        while steps.count("cancelled") < 3:
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({failing, cancelled})
        assert isinstance(failing.exception(), ValueError)
        await asyncio.wait_for(work(steps, "last", 2), 10)
        assert steps[-2:] == ["last", "last"]

    asyncio.run(live())


@pytest.fixture
def taken_apart(monkeypatch) -> list[bytes]:
    """The ids of the entries of logs that somebody has come to."""
    found, read = list[bytes](), TokenChunk.from_entry

    def noted(entry_id: bytes, fields: Mapping[bytes, bytes]) -> TokenChunk:
        found.append(entry_id)
        return read(entry_id, fields)

    monkeypatch.setattr(TokenChunk, "from_entry", noted)
    return found


def test_of_what_a_loop_has_read_only_what_its_readers_come_to_is_taken_apart(broker, taken_apart):
    claimed = submit_and_claim(broker, id="a")
    for number in range(NUM_ENTRIES):
        broker.commit([make_item(claimed.claim, number, number + 1)])
    broker.commit([make_item(claimed.claim, NUM_ENTRIES, NUM_ENTRIES, final=True)])
    taken_apart.clear()

    async def read() -> list[tuple[int, int]]:
        client = AsyncClient(async_twin(broker.connection), queue=broker.keys.queue)
        found = list[tuple[int, int]]()
        async with client, aclosing(client.attach("a").follow_reads()) as reads:
            async for items in reads:
                found.append((len(items), len(taken_apart)))
        return found

    # The completion stands in an entry of its own.
    chunks = [(1, number + 1) for number in range(NUM_ENTRIES)]
    assert asyncio.run(read()) == [*chunks, (1, NUM_ENTRIES)]


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["result", "of one that has ended"])
def test_others_of_the_loop_get_on_while_a_log_is_taken_apart(broker, monkeypatch, is_waited_for):
    claimed = submit_and_claim(broker, id="a")
    for number in range(NUM_ENTRIES):
        broker.commit([make_item(claimed.claim, number, number + 1)])
    broker.commit([make_item(claimed.claim, NUM_ENTRIES, NUM_ENTRIES, final=True)])
    rounds, read, taken_in = [0], TokenChunk.from_entry, list[int]()

    def noted(entry_id: bytes, fields: Mapping[bytes, bytes]) -> TokenChunk:
        taken_in.append(rounds[0])
        return read(entry_id, fields)

    async def count_rounds() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    async def whole() -> Completion | None:
        client = AsyncClient(async_twin(broker.connection), queue=broker.keys.queue)
        counting = asyncio.create_task(count_rounds())
        try:
            async with client:
                if is_waited_for:
                    return await client.attach("a").result()
                return await completion_of(client.brokers[0], "a")
        finally:
            counting.cancel()

    monkeypatch.setattr(TokenChunk, "from_entry", noted)
    completion = asyncio.run(whole())
    assert completion is not None
    assert completion.token_ids == tuple(map(token_at, range(NUM_ENTRIES)))
    # Each in a round of its own.
    assert len(set(taken_in)) == len(taken_in) == NUM_ENTRIES


@pytest.mark.parametrize("turn_seconds", [0.0, 60.0])
def test_what_stands_before_an_entry_that_is_not_ours_is_given(broker, monkeypatch, turn_seconds):
    monkeypatch.setattr(turns, "TURN_SECONDS", turn_seconds)
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    broker.commit([make_item(claimed.claim, 1, 3)])
    broker.connection.xadd(broker.keys.output("a"), {"neither": "nor"}, id="9-9")
    found = list[int]()

    async def read() -> None:
        client = AsyncClient(async_twin(broker.connection), queue=broker.keys.queue)
        async with client:
            async for chunk in client.stream("a"):
                found.append(chunk.end)

    with pytest.raises(ProtocolError, match="9-9"):
        asyncio.run(read())
    assert found == [1, 3]
    with pytest.raises(ProtocolError, match="9-9"):
        found.extend(chunk.end for chunk in Client(broker).stream("a"))
    assert found == [1, 3, 1, 3]
