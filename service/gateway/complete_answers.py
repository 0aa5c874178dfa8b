"""Sends a complete answer (one that is not streamed), no faster than the caller reads it.

The server buffers everything it gets until the caller has read it. If many megabytes were handed to
it at once, the answer would no longer count as open, and callers that repeat calls without reading
the answers would fill the memory. So an answer is handed over in parts, and counts as open
(`max_open_answers`) until its caller has read most of it.
"""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import chain

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.shared.http.tasks import HungUp

#: Bytes that are handed to the server at once: as much as it buffers before `send` waits.
PART_BYTES = 64 << 10


async def send_with_timeout(message: Message, send: Send, *, patience_seconds: float) -> None:
    """Send a message, which waits until the caller has read most of the earlier ones.

    HungUp if that takes longer than `patience_seconds`.
    """
    try:
        async with asyncio.timeout(patience_seconds):
            await send(message)
    except TimeoutError:
        raise HungUp from None


class CompleteAnswer(Response):
    """The response with a complete answer; it ends when the caller has read most of it.

    HungUp if the caller reads nothing for `patience_seconds`.
    """

    media_type = "application/json"

    def __init__(self, body: bytes, *, headers: Mapping[str, str], patience_seconds: float) -> None:
        super().__init__(body, headers=headers)
        self._patience_seconds = patience_seconds

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        for message in chain([start], self._bodies()):
            await send_with_timeout(message, send, patience_seconds=self._patience_seconds)

    def _bodies(self) -> Iterator[Message]:
        body = memoryview(self.body)
        if len(body) <= PART_BYTES:
            yield {"type": "http.response.body", "body": self.body}
            return
        for first in range(0, len(body), PART_BYTES):
            part = bytes(body[first : first + PART_BYTES])
            yield {"type": "http.response.body", "body": part, "more_body": True}
        # Sent once the caller has read everything but the contents of the buffers.
        yield {"type": "http.response.body", "body": b""}
