"""Sends the events of a response, from its first one or after the last one that a caller has.

The log is always read from its beginning: the number of an event is a function of all tokens before
it (see quire/openai/responses/events.py). Events that the caller has are made and not sent.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from time import monotonic
from typing import Any

from quire.errors import QuireError
from quire.openai.logprobs import compact_ascii
from quire.openai.responses.call import Kept
from quire.openai.responses.events import Event, OutputEvents
from quire.openai.responses.writing import written_response
from quire.transport.turns import TURN_SECONDS
from quire.wire.output import Completion, TokenChunk
from service.gateway.answers import Update
from service.gateway.refusals import Refused, refusal_of
from service.gateway.responses.log import ResponseLog
from service.gateway.streaming import DONE, JOINED_BYTES, EventStream, comment_of

#: The number before that of the first event.
BEFORE_ALL = -1


class ResponseStream(EventStream):
    """The events after the number `after`. See EventStream for errors and disconnects.

    The number of an event of type `error` is that of the last event before it, so that a caller who
    comes back after it misses nothing.
    """

    def __init__(self, log: ResponseLog, kept: Kept, *, after: int, **options: Any) -> None:
        is_resumed = after > BEFORE_ALL
        super().__init__(log, is_resumed=is_resumed, has_all=False, include_usage=False, **options)
        self._log = log
        self._kept = kept
        self._last = after

    async def _bodies(self, updates: AsyncIterator[Update | None]) -> AsyncGenerator[bytes, None]:
        # The status has been sent.
        self._log.raises_failure = False
        events = OutputEvents(self._kept)
        try:
            async for body in joined_in_turns([self._written(events.opening())]):
                yield body
            async for item in updates:
                if item is None:
                    yield comment_of(await self._missing())
                    continue
                groups = (self._written(self._of(one, events)) for one in item[1])
                async for body in joined_in_turns(groups):
                    yield body
        except (QuireError, Refused) as error:
            refusal = refusal_of(error)
            told = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
            event = {"type": "error", "sequence_number": self._last, **told}
            yield b"".join(_parts_of(event))
            await self._on_error(error)
            return
        yield DONE

    def _of(self, one: TokenChunk | Completion, events: OutputEvents) -> Iterator[Event]:
        if isinstance(one, Completion):
            yield from events.ending(one)
        else:
            self._note_first_token()
            yield from events.chunk(one)

    def _written(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            if event["sequence_number"] > self._last:
                self._last = event["sequence_number"]
                yield from _parts_of(event)


async def joined_in_turns(groups: Iterable[Iterable[bytes]]) -> AsyncGenerator[bytes, None]:
    """The events of all groups in order, joined up to JOINED_BYTES.

    Others run after each body, and when groups take long of which the caller has everything.
    """
    body, turn_ends = bytearray(), monotonic() + TURN_SECONDS
    for group in groups:
        for part in group:
            body += part
            if len(body) >= JOINED_BYTES:
                yield bytes(body)
                body.clear()
                await asyncio.sleep(0)
        if monotonic() >= turn_ends:
            await asyncio.sleep(0)
            turn_ends = monotonic() + TURN_SECONDS
    if body:
        yield bytes(body)


def _parts_of(event: Event) -> Iterator[bytes]:
    yield f"event: {event['type']}\nid: {event['sequence_number']}\ndata: ".encode()
    if event["type"].endswith(".delta"):
        # There are many of these, each with little in it.
        yield compact_ascii(event).encode()
    else:
        for part in written_response(event, encode=compact_ascii):
            yield part.encode()
    yield b"\n\n"
