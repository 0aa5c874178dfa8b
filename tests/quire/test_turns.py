"""Long works in one loop: how many of them have a turn before the loop comes round again."""

import asyncio

import pytest

from quire import turns
from quire.output_log import logs_in, logs_in_turns
from quire.testing import FakeQuire
from quire.turns import Turn


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


def test_what_a_loop_reads_of_many_logs_is_what_a_thread_reads_and_others_get_on():
    with FakeQuire(answer=lambda request: request.body["prompt"]) as fake:
        client = fake.client()
        prompts = ["one", "two", "three"]
        seen = dict[str, int]()
        for prompt in prompts:
            handle = client.submit(prompt)
            handle.result(timeout=10)
            seen[handle.request_id] = len(seen)
        keys = fake.broker.keys
        fake.connection.xadd(keys.output("damaged"), {"neither": "nor"}, id="1-1")
        seen["damaged"] = 0
        logs = {keys.output(request_id): "0-0" for request_id in [*seen, "of-others"]}
        reply = fake.connection.xread(logs)

    async def rounds() -> int:
        reading = asyncio.create_task(logs_in_turns(reply, keys, seen))
        rounds = 0
        while not reading.done():
            await asyncio.sleep(0)
            rounds += 1
        found, expected = dict(await reading), dict(logs_in(reply, keys, seen))
        assert str(found.pop("damaged")) == str(expected.pop("damaged"))
        assert found == expected
        assert [read.chunks[0].text for read in found.values()] == ["one", "wo", "ree"]
        return rounds

    # A round behind each entry, at least.
    assert asyncio.run(rounds()) >= 6
