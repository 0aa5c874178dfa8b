"""Sends a whole answer, no faster than its caller takes it.

The server keeps all that it is handed until the caller has taken it. An answer of many megabytes
that is handed over at once is over for us, and its place free for the next: callers who ask again
and again and take nothing would fill the memory.
"""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import chain

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.gateway.http.tasks import HungUp

#: What the server is handed at once, which is what it holds before it lets us wait.
PART_BYTES = 64 << 10


async def send_in_patience(message: Message, send: Send, *, patience_seconds: float) -> None:
    """Hand something to the server, which takes it once the caller has taken what was before.

    HungUp when that takes too long.
    """
    try:
        async with asyncio.timeout(patience_seconds):
            await send(message)
    except TimeoutError:
        raise HungUp from None


class WholeAnswer(Response):
    """The response that tells an answer in one piece; it lasts until most of it is taken.

    HungUp when the caller takes nothing for `patience_seconds`.
    """

    media_type = "application/json"

    def __init__(self, body: bytes, *, headers: Mapping[str, str], patience_seconds: float) -> None:
        super().__init__(body, headers=headers)
        self._patience_seconds = patience_seconds

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        for message in chain([start], self._bodies()):
            await send_in_patience(message, send, patience_seconds=self._patience_seconds)

    def _bodies(self) -> Iterator[Message]:
        body = memoryview(self.body)
        if len(body) <= PART_BYTES:
            yield {"type": "http.response.body", "body": self.body}
            return
        for first in range(0, len(body), PART_BYTES):
            part = bytes(body[first : first + PART_BYTES])
            yield {"type": "http.response.body", "body": part, "more_body": True}
        # Sent when the caller has taken all but what the buffers hold.
        yield {"type": "http.response.body", "body": b""}
