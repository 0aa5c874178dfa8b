"""Sends the events of a response, from its first one or after the last one that a caller has.

The log is always read from its beginning: the number of an event is a function of all tokens before
it (see quire/openai/responses/events.py). Events that the caller has are made and not sent.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from quire.errors import QuireError
from quire.openai.responses.call import Kept
from quire.openai.responses.events import Event, OutputEvents
from quire.wire.output import Completion, TokenChunk
from service.gateway.answers import Update
from service.gateway.refusals import Refused, refusal_of
from service.gateway.responses.log import ResponseLog
from service.gateway.streaming import COMMENT, DONE, NO_WORKER, EventStream, joined

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
            for body in joined(self._written(events.opening())):
                yield body
            async for item in updates:
                if item is None:
                    yield COMMENT if await self._has_worker() else NO_WORKER
                    continue
                for body in joined(self._written(self._of(item[1], events))):
                    yield body
        except (QuireError, Refused) as error:
            refusal = refusal_of(error)
            told = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
            yield _event({"type": "error", "sequence_number": self._last, **told})
            await self._on_error(error)
            return
        yield DONE

    def _of(
        self, updates: Sequence[TokenChunk | Completion], events: OutputEvents
    ) -> Iterator[Event]:
        for one in updates:
            if isinstance(one, Completion):
                yield from events.ending(one)
            else:
                self._note_first_token()
                yield from events.chunk(one)

    def _written(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            if event["sequence_number"] > self._last:
                self._last = event["sequence_number"]
                yield _event(event)


def _event(event: Event) -> bytes:
    head = f"event: {event['type']}\nid: {event['sequence_number']}\n"
    return f"{head}data: {json.dumps(event)}\n\n".encode()
