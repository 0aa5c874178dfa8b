"""Work ends when its caller goes, even if a library on its way has lost the word."""

import asyncio

import pytest

from service.gateway.answers import merged
from service.gateway.refusals import Refused
from service.shared.http.tasks import HungUp, end, while_connected


async def stays() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def hangs_up() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def deaf(times: int) -> None:
    """Loses so many cancellations."""
    for _ in range(times):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def test_the_result_is_that_of_the_work():
    async def work() -> int:
        return 3

    assert asyncio.run(while_connected(stays, work())) == 3


def test_what_the_work_raises_is_raised():
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(while_connected(stays, work()))


def test_work_whose_caller_goes_is_ended_even_if_it_does_not_hear_at_once():
    async def play() -> None:
        with pytest.raises(HungUp):
            await while_connected(hangs_up, deaf(2))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())


def test_who_is_ended_insistently_ends_its_own_tasks_all_the_same():
    async def outer(inner: asyncio.Task[None]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await end(inner)

    async def play() -> None:
        inner = asyncio.create_task(deaf(2))
        working = asyncio.create_task(outer(inner))
        await asyncio.sleep(0)
        await end(working)
        assert working.cancelled() and inner.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())


def test_tasks_that_have_ended_by_themselves_are_left_as_they_are():
    async def play() -> None:
        done = asyncio.ensure_future(asyncio.sleep(0))
        await done
        await end(done)
        assert not done.cancelled()

    asyncio.run(play())


async def items(*values):
    for value in values:
        yield value


async def silent():
    await asyncio.Event().wait()
    yield 0


def test_the_items_of_all_sources_come_each_in_its_own_order():
    async def play() -> list[int | None]:
        both = merged([items(1, 2), items(10, 20)], asyncio.Event(), idle_seconds=9)
        return [item async for item in both]

    found = asyncio.run(play())
    assert [item for item in found if item < 10] == [1, 2]
    assert [item for item in found if item >= 10] == [10, 20]


def test_silence_is_told_and_the_word_to_close_ends_it():
    async def play() -> None:
        closing = asyncio.Event()
        news = merged([silent()], closing, idle_seconds=0.001)
        assert await anext(news) is None
        closing.set()
        with pytest.raises(Refused, match="is shutting down"):
            await anext(news)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())
