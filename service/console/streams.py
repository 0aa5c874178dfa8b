"""Keeps an open page up to date by server-sent events.

`part`: the changed part of the page as HTML, when it differs from what was sent last. `text`: a
piece of an output; its id is the number of tokens up to its end, so that a browser that comes back
gets the next one. `trouble`: why nothing new can be read now.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError, UnknownRequest
from service.console.reading.request import Piece
from service.console.views import shown
from service.shared.http.tasks import HungUp, while_connected

#: A comment is sent after this long without an event, so that no proxy drops the connection.
COMMENT_SECONDS = 15.0

#: How often the output of a request is looked at.
TEXT_SECONDS = 0.25

#: How long a browser may read nothing of what it was sent.
PATIENCE_SECONDS = 30.0

COMMENT = b": nothing new\n\n"

#: Renders the part of a page that changes.
Render = Callable[[], Awaitable[str]]
#: Reads the text of a request after a number of tokens.
ReadText = Callable[[int], Awaitable[Piece]]


class LiveStream(Response):
    """The events of one open page, until its browser goes away or the console closes.

    `open_one` is the context in which the stream counts as open. With `read_text` the output of a
    request is sent too, from `seen` tokens on.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        render: Render,
        *,
        refresh_seconds: float,
        closing: asyncio.Event,
        open_one: AbstractContextManager[None],
        read_text: ReadText | None = None,
        seen: int = 0,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        # The length is not known in advance.
        del self.headers["content-length"]
        self._render = render
        self._refresh_seconds = refresh_seconds
        self._closing = closing
        self._open_one = open_one
        self._read_text = read_text
        self._seen = seen

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        with self._open_one:
            try:
                await while_connected(receive, self._respond(send))
            except HungUp:
                # The browser has gone; nobody waits for an end of the response.
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _respond(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events():
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except TimeoutError:
                raise HungUp from None

    async def _events(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        part, trouble, refresh_at, spoke_at = "", "", loop.time(), loop.time()
        while not self._closing.is_set():
            events: list[bytes] = []
            try:
                if self._read_text is not None:
                    events += await self._text_events(self._read_text)
                if loop.time() >= refresh_at:
                    refresh_at = loop.time() + self._refresh_seconds
                    found = await self._render()
                    if found != part:
                        events.append(event_of("part", {"html": found}))
                    part = found
                trouble = ""
            except QuireError as error:
                if str(error) != trouble:
                    events.append(event_of("trouble", {"text": str(error)}))
                trouble = str(error)
                if isinstance(error, UnknownRequest):
                    # Its retention has passed; there is nothing more to come.
                    self._read_text = None
            if not events and loop.time() - spoke_at > COMMENT_SECONDS:
                events.append(COMMENT)
            if events:
                spoke_at = loop.time()
                yield b"".join(events)
            await self._rest(refresh_at - loop.time())

    async def _text_events(self, read: ReadText) -> list[bytes]:
        piece = await read(self._seen)
        events = []
        if piece.is_reset:
            events.append(event_of("reset", {}, event_id="0"))
            piece = await read(0)
        self._seen = piece.seen
        if piece.text or events:
            events.append(event_of("text", {"text": shown(piece.text)}, event_id=str(piece.seen)))
        if piece.has_ended:
            self._read_text = None
        return events

    async def _rest(self, seconds: float) -> None:
        """Waits until the next look, or until the console closes."""
        if self._read_text is not None:
            seconds = min(seconds, TEXT_SECONDS)
        try:
            async with asyncio.timeout(max(0.01, seconds)):
                await self._closing.wait()
        except TimeoutError:
            pass


def event_of(name: str, data: Mapping[str, Any], *, event_id: str | None = None) -> bytes:
    """One event. JSON in ASCII, so that no character of a text ends a line."""
    first = "" if event_id is None else f"id: {event_id}\n"
    return f"{first}event: {name}\ndata: {json.dumps(data)}\n\n".encode()
