"""Sends an answer as server-sent events, for as long as the caller is connected.

The `id` of an event says how far the caller has read with it (see places.py): a caller that comes
back with the last id gets the next token, from this gateway or from any other. Events that are
ready at the same time are sent together.
"""

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.openai.answers import ending, opening, piece, usage_piece
from quire.wire.output import Completion, TokenChunk
from service.gateway.answers import Answer, News
from service.gateway.cursors import Place, event_id
from service.gateway.http.tasks import HungUp, end, while_connected
from service.gateway.refusals import Refused, refusal_of
from service.gateway.whole_answers import send_in_patience

#: How long the status of a stream waits for the first event: an error within this time becomes a
#: status, a later one an event after a 200.
FIRST_WORD_SECONDS = 1.0

#: After this long without an event a comment is sent, so that no proxy drops the connection.
SILENCE_SECONDS = 15.0

#: Events that are ready at the same time are joined up to this size. The server buffers several
#: times as much for a slow caller, so this hardly changes what it has to read in its patience.
JOINED_BYTES = 16 << 10

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
#: Without a blank line: that would end an event without data, which OpenAI's Python client takes
#: for a real one as soon as it has seen an `id`.
_COMMENT = b": the answer goes on\n"
#: The same where the registry has no live worker.
_NOBODY = b": no worker of this queue is alive; the request waits for one\n"
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The response that sends an answer as it is generated.

    An error within FIRST_WORD_SECONDS is raised before anything is sent, as the Refused that
    `untold` makes of it; a later one is sent as the last event, with `error` in it. `on_error` is
    awaited for both. `on_first_token` is called once. A caller that `has_all` of an answer that has
    ended gets 204: a browser's EventSource would come back to a 200 for ever. While nothing comes,
    comments say that the answer goes on, or that it waits for a worker. When the caller
    disconnects, or takes nothing for `patience_seconds`, `on_hang_up` is awaited and HungUp raised.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        *,
        is_resumed: bool,
        has_all: bool,
        include_usage: bool,
        patience_seconds: float,
        headers: Mapping[str, str],
        is_served: Callable[[], Awaitable[bool]],
        on_first_token: Callable[[], None],
        on_error: Callable[[QuireError | Refused], Awaitable[None]],
        untold: Callable[[QuireError | Refused], Refused],
        on_hang_up: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        # The length is not known in advance.
        del self.headers["content-length"]
        self._answer = answer
        self._is_resumed = is_resumed
        self._has_all = has_all
        self._include_usage = include_usage
        self._patience_seconds = patience_seconds
        self._is_served = is_served
        self._on_first_token = on_first_token
        self._on_error = on_error
        self._untold = untold
        self._on_hang_up = on_hang_up

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._respond(send))
        except HungUp:
            await self._on_hang_up()
            raise
        except (QuireError, Refused) as error:
            await self._on_error(error)
            raise self._untold(error) from error

    async def _respond(self, send: Send) -> None:
        async with aclosing(self._answer.news(silence_seconds=SILENCE_SECONDS)) as news:
            heard: list[News] = []
            if self._has_all and await self._is_over(news, heard):
                await self._tell_no_more(send)
                return
            following = again(heard, news) if heard else news
            first = asyncio.ensure_future(anext(following))
            try:
                await asyncio.wait({first}, timeout=FIRST_WORD_SECONDS)
                comment = b""
                if first.done():
                    first.result()
                elif not await self._is_served():
                    comment = _NOBODY
                await self._tell(first, following, send, comment=comment)
            finally:
                await end(first)
        # The last await: once the response has ended, the server no longer reports a hang-up.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _is_over(self, news: AsyncIterator[News | None], heard: list[News]) -> bool:
        """Whether the answer has ended without anything the caller lacks; adds what it reads."""
        async for item in news:
            if item is None:
                return False
            heard.append(item)
            if not all(isinstance(one, Completion) for one in item[1]):
                return False
        return True

    async def _tell_no_more(self, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-type"]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(
        self,
        first: Awaitable[News | None],
        news: AsyncIterator[News | None],
        send: Send,
        *,
        comment: bytes,
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if comment:
            await self._send(comment, send)
        async with aclosing(self._bodies(chained(first, news))) as bodies:
            async for body in bodies:
                await self._send(body, send)

    async def _send(self, body: bytes, send: Send) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": True}
        await send_in_patience(message, send, patience_seconds=self._patience_seconds)

    async def _bodies(self, news: AsyncIterator[News | None]) -> AsyncGenerator[bytes, None]:
        """The events as bytes, joined if they are ready at the same time."""
        ends: dict[int, Completion] = {}
        try:
            for body in joined(self._openings()):
                yield body
            async for item in news:
                if item is None:
                    yield _COMMENT if await self._is_served() else _NOBODY
                    continue
                for body in joined(self._events(*item, ends)):
                    yield body
        except (QuireError, Refused) as error:
            yield _written(refusal_of(error).body, event_id(self._answer.places))
            await self._on_error(error)
            return
        for body in joined(self._last_events(ends)):
            yield body

    def _openings(self) -> Iterator[bytes]:
        heading = self._answer.asked.heading
        if heading.is_chat and not self._is_resumed:
            for choice in range(len(self._answer.places)):
                yield self._event(opening(heading, choice))

    def _events(
        self, choice: int, news: Sequence[TokenChunk | Completion], ends: dict[int, Completion]
    ) -> Iterator[bytes]:
        """The events for the news of one choice; puts its end into `ends`."""
        heading, places = self._answer.asked.heading, self._answer.places
        for one in news:
            if isinstance(one, Completion):
                ends[choice] = one
                if not places[choice].has_end:
                    places[choice] = replace(places[choice], has_end=True)
                    yield self._event(ending(heading, choice, one))
                continue
            self._note_first_token()
            places[choice] = Place.behind(one)
            yield self._event(piece(heading, choice, one))

    def _last_events(self, ends: Mapping[int, Completion]) -> Iterator[bytes]:
        asked = self._answer.asked
        if self._include_usage:
            completions = [ends[choice] for choice in sorted(ends)]
            usage = usage_piece(asked.heading, completions, num_prompts=asked.num_prompts)
            yield self._event(usage, has_usage=True)
        yield _DONE

    def _event(self, body: dict[str, Any], *, has_usage: bool = False) -> bytes:
        if self._include_usage:
            body.setdefault("usage", None)
        return _written(body, event_id(self._answer.places, has_usage=has_usage))

    def _note_first_token(self) -> None:
        told, self._on_first_token = self._on_first_token, _nothing
        told()


async def again(
    heard: Sequence[News], rest: AsyncIterator[News | None]
) -> AsyncGenerator[News | None, None]:
    """What was read already, and then the rest."""
    for item in heard:
        yield item
    async for other in rest:
        yield other


async def chained(
    first: Awaitable[News | None], rest: AsyncIterator[News | None]
) -> AsyncIterator[News | None]:
    """The item that is awaited already, and then the rest."""
    yield await first
    async for item in rest:
        yield item


def joined(events: Iterable[bytes]) -> Iterator[bytes]:
    """The events in order, joined up to JOINED_BYTES; lazily, as bodies are taken."""
    body = bytearray()
    for event in events:
        body += event
        if len(body) >= JOINED_BYTES:
            yield bytes(body)
            body.clear()
    if body:
        yield bytes(body)


def _written(body: Mapping[str, Any], last: str) -> bytes:
    return f"id: {last}\ndata: {json.dumps(body)}\n\n".encode()


def _nothing() -> None:
    """Does nothing, in place of `on_first_token` once it was called."""
