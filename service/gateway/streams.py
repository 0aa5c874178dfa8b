"""Tells an answer as server-sent events, for as long as somebody listens.

An event says in its `id` how far the caller has come with it (see places.py), so that one who comes
back with the last id gets the next token, of this gateway or of any other. Events that are ready at
once are sent together.
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
from quire.openai_answers import ending, opening, piece, usage_piece
from quire.output import Completion, TokenChunk
from service.gateway.answers import Answer, News
from service.gateway.places import Place, event_id
from service.gateway.refusals import Refused, refusal_of
from service.gateway.tasks import HungUp, end, while_connected

#: For so long the status of a stream waits for the first word of it: what is refused by then is
#: told by a status, and not by an event behind a 200.
FIRST_WORD_SECONDS = 1.0

#: After so long without an event a comment is sent, lest a proxy take the connection for dead.
SILENCE_SECONDS = 15.0

#: Events that are ready at once are joined until they have so many bytes. The server holds several
#: times as much for a slow caller, so what one has to take in its patience hardly changes by it.
JOINED_BYTES = 16 << 10

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
#: No blank line behind it: that would end an event without data, which OpenAI's client for Python
#: takes for one as soon as it has seen an `id`.
_COMMENT = b": the answer goes on\n"
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The response that tells an answer as it comes.

    What goes wrong within FIRST_WORD_SECONDS is raised, before anything is sent, as the Refused
    that `untold` makes of it; what goes wrong later is told by an event with `error` in it, the
    last one. `on_error` is awaited for both. `on_first_token` is called once, and `on_hang_up`
    awaited when the caller goes, or takes nothing for `patience_seconds`; then HungUp is raised.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        *,
        is_resumed: bool,
        include_usage: bool,
        patience_seconds: float,
        headers: Mapping[str, str],
        on_first_token: Callable[[], None],
        on_error: Callable[[QuireError | Refused], Awaitable[None]],
        untold: Callable[[QuireError | Refused], Refused],
        on_hang_up: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        # The length is not known, so the connection says where it ends.
        del self.headers["content-length"]
        self._answer = answer
        self._is_resumed = is_resumed
        self._include_usage = include_usage
        self._patience_seconds = patience_seconds
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
            first = asyncio.ensure_future(anext(news))
            try:
                await asyncio.wait({first}, timeout=FIRST_WORD_SECONDS)
                if first.done():
                    first.result()
                await self._tell(first, news, send)
            finally:
                await end(first)
        # Nothing is awaited behind it: with the response the server's watch for a hang-up ends.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(
        self, first: Awaitable[News | None], news: AsyncIterator[News | None], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._bodies(chained(first, news))) as bodies:
            async for body in bodies:
                await self._send(body, send)

    async def _send(self, body: bytes, send: Send) -> None:
        """Hand events to the server, which takes them once the caller has taken those before."""
        try:
            async with asyncio.timeout(self._patience_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise HungUp from None

    async def _bodies(self, news: AsyncIterator[News | None]) -> AsyncGenerator[bytes, None]:
        """The events, those together that are ready at once."""
        ends: dict[int, Completion] = {}
        try:
            for body in joined(self._openings()):
                yield body
            async for item in news:
                if item is None:
                    yield _COMMENT
                    continue
                for body in joined(self._events(*item, ends)):
                    yield body
        except (QuireError, Refused) as error:
            yield _written(refusal_of(error).body, self._answer.places)
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
        """The events of what came of a choice; notes its end."""
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
            yield self._event(usage)
        yield _DONE

    def _event(self, body: dict[str, Any]) -> bytes:
        if self._include_usage:
            body.setdefault("usage", None)
        return _written(body, self._answer.places)

    def _note_first_token(self) -> None:
        told, self._on_first_token = self._on_first_token, _nothing
        told()


async def chained(
    first: Awaitable[News | None], rest: AsyncIterator[News | None]
) -> AsyncIterator[News | None]:
    """What is on its way already, and then the rest."""
    yield await first
    async for item in rest:
        yield item


def joined(events: Iterable[bytes]) -> Iterator[bytes]:
    """The events in their order, joined up to JOINED_BYTES, and formed only as they are taken."""
    body = bytearray()
    for event in events:
        body += event
        if len(body) >= JOINED_BYTES:
            yield bytes(body)
            body.clear()
    if body:
        yield bytes(body)


def _written(body: Mapping[str, Any], places: Sequence[Place]) -> bytes:
    return f"id: {event_id(places)}\ndata: {json.dumps(body)}\n\n".encode()


def _nothing() -> None:
    """Nobody is to be told any more."""
