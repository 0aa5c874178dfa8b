"""Sends an answer as server-sent events, for as long as the caller is connected.

The `id` of an event is the caller's cursors after that event (see cursors.py). A caller that comes
back with the last id gets the next token, from this gateway or from any other one. Events that are
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
from quire.openai.answers import (
    ending,
    ending_in_parts,
    opening,
    piece,
    piece_in_parts,
    usage_piece,
    usage_so_far,
)
from quire.openai.logprobs import compact_ascii, written
from quire.wire.output import Completion, TokenChunk
from service.gateway.answers import Answer, Update
from service.gateway.complete_answers import send_with_timeout
from service.gateway.cursors import Cursor, event_id
from service.gateway.refusals import Refused, refusal_of
from service.shared.http.tasks import HungUp, end, while_connected

#: How long a stream waits for its first event before it sends its status. An error within this time
#: becomes the status, a later one an event after a 200.
FIRST_EVENT_SECONDS = 1.0

#: A comment is sent after this long without an event, so that no proxy drops the connection.
COMMENT_SECONDS = 15.0

#: Events that are ready at the same time are joined up to this size, in bytes. The server buffers
#: several times as much for a slow caller, so joining hardly changes how much the caller must read
#: within `patience_seconds`.
JOINED_BYTES = 16 << 10

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


def comment_of(missing: str) -> bytes:
    """The comment of a stream without news: what its request waits for, or that it goes on.

    Without a blank line after it. That would end an event without data, and OpenAI's Python client
    takes one for a real event once it has seen an `id`.
    """
    return f": {missing or 'the answer goes on'}\n".encode()


class EventStream(Response):
    """The response that sends an answer while it is generated.

    - An error within FIRST_EVENT_SECONDS is raised before anything is sent, as the Refused that
      `refuse` makes of it. A later error is sent as the last event, with `error` in it. `on_error`
      is awaited for both.
    - `on_first_token` is called once.
    - If the answer has ended and the caller `has_all` of it, the response is 204. After a 200 a
      browser's EventSource would reconnect for ever.
    - With `shows_usage_always`, each event has the usage so far, once a prompt is known.
    - While no event comes, comments say that the answer goes on, or that it waits for a worker.
    - If the caller disconnects, or reads nothing for `patience_seconds`, `on_hang_up` is awaited
      and HungUp is raised.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        *,
        is_resumed: bool,
        has_all: bool,
        include_usage: bool,
        shows_usage_always: bool = False,
        patience_seconds: float,
        headers: Mapping[str, str],
        missing: Callable[[], Awaitable[str]],
        on_first_token: Callable[[], None],
        on_error: Callable[[QuireError | Refused], Awaitable[None]],
        refuse: Callable[[QuireError | Refused], Refused],
        on_hang_up: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        # The length is not known in advance.
        del self.headers["content-length"]
        self._answer = answer
        self._is_resumed = is_resumed
        self._has_all = has_all
        self._include_usage = include_usage
        self._shows_usage_always = shows_usage_always
        #: The tokens of the prompts that are known, by choice.
        self._prompt_lengths: dict[int, int] = {}
        self._patience_seconds = patience_seconds
        self._missing = missing
        self._on_first_token = on_first_token
        self._on_error = on_error
        self._refuse_before_start = refuse
        self._on_hang_up = on_hang_up

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._respond(send))
        except HungUp:
            await self._on_hang_up()
            raise
        except (QuireError, Refused) as error:
            await self._on_error(error)
            raise self._refuse_before_start(error) from error

    async def _respond(self, send: Send) -> None:
        async with aclosing(self._answer.updates(idle_seconds=COMMENT_SECONDS)) as updates:
            already_read: list[Update] = []
            if self._has_all and await self._is_over(updates, already_read):
                await self._send_no_content(send)
                return
            following = replayed(already_read, updates) if already_read else updates
            first = asyncio.ensure_future(anext(following))
            try:
                await asyncio.wait({first}, timeout=FIRST_EVENT_SECONDS)
                comment = b""
                if first.done():
                    first.result()
                elif missing := await self._missing():
                    comment = comment_of(missing)
                await self._send_events(first, following, send, comment=comment)
            finally:
                await end(first)
        # Must be the last await: after the end of the response the server reports no disconnect.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _is_over(
        self, updates: AsyncIterator[Update | None], already_read: list[Update]
    ) -> bool:
        """Whether no token is left to send: the rest of the answer is completions alone.

        Appends the updates that it reads to `already_read`.
        """
        async for item in updates:
            if item is None:
                return False
            already_read.append(item)
            if not all(isinstance(one, Completion) for one in item[1]):
                return False
        return True

    async def _send_no_content(self, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-type"]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(
        self,
        first: Awaitable[Update | None],
        updates: AsyncIterator[Update | None],
        send: Send,
        *,
        comment: bytes,
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if comment:
            await self._send(comment, send)
        async with aclosing(self._bodies(chained(first, updates))) as bodies:
            async for body in bodies:
                await self._send(body, send)

    async def _send(self, body: bytes, send: Send) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": True}
        await send_with_timeout(message, send, patience_seconds=self._patience_seconds)

    async def _bodies(self, updates: AsyncIterator[Update | None]) -> AsyncGenerator[bytes, None]:
        """The bytes of all events; those that are ready at the same time are joined."""
        ends: dict[int, Completion] = {}
        try:
            if self._shows_usage_always and self._is_resumed:
                self._prompt_lengths = await self._answer.prompt_lengths()
            for body in joined(self._openings()):
                yield body
            async for item in updates:
                if item is None:
                    yield comment_of(await self._missing())
                    continue
                for body in joined(self._events(*item, ends)):
                    yield body
                    if len(body) >= JOINED_BYTES:
                        # More is ready. Others run before it is made: it may be a long prompt.
                        await asyncio.sleep(0)
        except (QuireError, Refused) as error:
            yield _written(refusal_of(error).body, event_id(self._answer.cursors))
            await self._on_error(error)
            return
        for body in joined(self._last_events(ends)):
            yield body

    def _openings(self) -> Iterator[bytes]:
        heading = self._answer.record
        if heading.is_chat and not self._is_resumed:
            for choice in range(len(self._answer.cursors)):
                yield self._event(opening(heading, choice))

    def _events(
        self, choice: int, updates: Sequence[TokenChunk | Completion], ends: dict[int, Completion]
    ) -> Iterator[bytes]:
        """The events for the updates of one choice; adds its completion to `ends`."""
        cursors = self._answer.cursors
        for one in updates:
            if isinstance(one, Completion):
                ends[choice] = one
                if not cursors[choice].has_end:
                    body = self._ending(choice, one)
                    cursors[choice] = replace(cursors[choice], has_end=True)
                    yield self._event(body)
                continue
            self._note_first_token()
            cursors[choice] = Cursor.after(one)
            if one.told_prompt:
                self._prompt_lengths[choice] = one.num_prompt_tokens
            piece = self._piece(choice, one)
            if piece is not None and one.prompt_token_ids:
                yield from self._event_in_parts(piece)
            elif piece is not None:
                yield self._event(piece)

    def _piece(self, choice: int, chunk: TokenChunk) -> dict[str, Any] | None:
        heading, messages = self._answer.record, self._answer.messages
        if messages:
            return piece_in_parts(heading, choice, chunk, messages[choice])
        return piece(heading, choice, chunk, kept=self._answer.kept_of(choice))

    def _ending(self, choice: int, completion: Completion) -> dict[str, Any]:
        heading, messages = self._answer.record, self._answer.messages
        if messages:
            return ending_in_parts(heading, choice, completion, messages[choice])
        # An output without a token had no piece that the text of the prompt could begin.
        has_begun = self._answer.cursors[choice].num_tokens > 0
        kept = "" if has_begun else self._answer.kept_of(choice)
        return ending(heading, choice, completion, kept=kept)

    def _last_events(self, ends: Mapping[int, Completion]) -> Iterator[bytes]:
        record = self._answer.record
        if self._include_usage:
            completions = [ends[choice] for choice in sorted(ends)]
            usage = usage_piece(
                record,
                completions,
                num_prompts=record.num_prompts,
                reasoning=[one.num_reasoning_tokens for one in self._answer.messages],
            )
            yield self._event(usage, has_usage=True)
        yield DONE

    def _event(self, body: dict[str, Any], *, has_usage: bool = False) -> bytes:
        self._add_usage(body)
        return _written(body, event_id(self._answer.cursors, has_usage=has_usage))

    def _event_in_parts(self, body: dict[str, Any]) -> Iterator[bytes]:
        """The event of a first token with the tokens of the prompt, which may be many."""
        self._add_usage(body)
        yield f"id: {event_id(self._answer.cursors)}\ndata: ".encode()
        for part in written(body, encode=compact_ascii):
            yield part.encode()
        yield b"\n\n"

    def _add_usage(self, body: dict[str, Any]) -> None:
        if self._include_usage and "usage" not in body:
            body["usage"] = self._usage_so_far() if self._shows_usage_always else None

    def _usage_so_far(self) -> dict[str, Any] | None:
        record, cursors = self._answer.record, self._answer.cursors
        each = record.num_choices // record.num_prompts
        known = {choice // each: length for choice, length in self._prompt_lengths.items()}
        return usage_so_far(list(known.values()), sum(one.num_tokens for one in cursors))

    def _note_first_token(self) -> None:
        on_first_token, self._on_first_token = self._on_first_token, _nothing
        on_first_token()


async def replayed(
    already_read: Sequence[Update], rest: AsyncIterator[Update | None]
) -> AsyncGenerator[Update | None, None]:
    """The updates that were read already, then the rest."""
    for item in already_read:
        yield item
    async for other in rest:
        yield other


async def chained(
    first: Awaitable[Update | None], rest: AsyncIterator[Update | None]
) -> AsyncIterator[Update | None]:
    """The item of a task that has been started already, then the rest."""
    yield await first
    async for item in rest:
        yield item


def joined(events: Iterable[bytes]) -> Iterator[bytes]:
    """The events in order, joined up to JOINED_BYTES; each is made when its body is needed."""
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
    """Replaces `on_first_token` after its only call."""
