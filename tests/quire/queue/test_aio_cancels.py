"""Who is cancelled while it asks Redis is cancelled, whatever the libraries below make of it."""

import asyncio
import contextlib

import pytest
from fakeredis import FakeAsyncRedis

from quire.queue.broker_async import AsyncBroker


@pytest.mark.parametrize("by", ["cancel", "timeout"])
def test_a_cancellation_that_the_library_drops_is_heeded_all_the_same(monkeypatch, by):
    """`asyncio.wait_for`, by which it sends, drops one up to Python 3.11 if all is just sent."""

    async def run() -> None:
        async with FakeAsyncRedis() as connection:
            asked = AsyncBroker(connection)
            begun = asyncio.Event()

            async def look(*_: object) -> list[object]:
                begun.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                return [None, {}, (0, 0)]

            monkeypatch.setattr("quire.queue.shard_async.send_async", look)
            if by == "timeout":
                async with asyncio.timeout(0.01):
                    await asked.status("a")
            waiting = asyncio.create_task(asked.status("a"))
            await begun.wait()
            waiting.cancel()
            await waiting

    with pytest.raises(TimeoutError if by == "timeout" else asyncio.CancelledError):
        asyncio.run(run())
