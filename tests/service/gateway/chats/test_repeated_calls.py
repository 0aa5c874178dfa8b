"""A call that is repeated with its key, at a gateway that reads functions otherwise."""

import asyncio

from service.gateway.callers import Caller
from service.gateway.idempotency import call_of
from service.gateway.queue import Queue
from service.gateway.requests import QueueOptions


def test_a_repeated_call_is_read_by_the_types_that_its_first_part_had(fake, monkeypatch):
    function = {"name": "f", "parameters": {"properties": {"color": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}

    def call():
        return call_of("chat.completions", body, tenant="default", key="k", model="fake")

    with monkeypatch.context() as earlier:
        earlier.setattr("quire.openai.requests.argument_types", lambda _: {})
        first = call()
    assert call().record.types == {"f": {"color": "s"}}

    async def submit_both():
        async with fake.async_client() as client:
            queue, options = Queue(client), QueueOptions("k", None, None, {})
            await queue.submit(first, Caller(), options)
            return await queue.submit(call(), Caller(), options)

    assert asyncio.run(submit_both()).types == {}
