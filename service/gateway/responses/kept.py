"""Finds responses again: what is kept in the record, and the output in the log. Knows no HTTP."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.client.following import MAX_READINGS
from quire.errors import InvalidRequest, OutputRewound, QuireError, ResultExpired, UnknownRequest
from quire.openai.responses.call import RESPONSE_ID, Kept
from quire.openai.responses.events import Event, OutputEvents
from quire.openai.responses.items import as_input, digests_of
from quire.openai.responses.resource import STATUS_OF, resource
from quire.queue.request.status import RequestStatus
from quire.transport.turns import Turn
from quire.wire.output import Completion
from service.gateway.callers import Caller
from service.gateway.idempotency import CallRecord
from service.gateway.queue import Queue
from service.gateway.queues import Queues
from service.gateway.refusals import Refusal, Refused
from service.gateway.responses.log import ResponseLog


@dataclass(frozen=True, slots=True)
class Found:
    """A response that exists: what is kept of it, and the status of its request."""

    kept: Kept
    status: RequestStatus
    queue: Queue


@dataclass(frozen=True, slots=True)
class Context:
    """What a response continues: items, and their pictures by digest."""

    items: Sequence[Mapping[str, Any]] = ()
    pictures: Mapping[str, bytes] = field(default_factory=dict)


class KeptResponses:
    """The responses of all queues. Methods raise the client's QuireErrors.

    When `closing` is set, those that wait raise Refused.
    """

    def __init__(self, queues: Queues, *, closing: asyncio.Event) -> None:
        self._queues = queues
        self._closing = closing

    async def find(self, response_id: str, caller: Caller) -> Found:
        """The response with this id.

        UnknownRequest if there is none, if it was not stored, or if it is another tenant's.
        """
        if not RESPONSE_ID.fullmatch(response_id):
            raise UnknownRequest(response_id)
        queue = await self._queues.holding(response_id)
        data = await queue.client.kept(response_id)
        status = await queue.client.status(response_id)
        if data is None or caller.tenant not in (None, status.tenant):
            raise UnknownRequest(response_id)
        return Found(Kept.decode(data), status, queue)

    async def body(self, found: Found) -> dict[str, Any]:
        """The body of the response now; it has its output once the response has ended."""
        if not found.status.state.is_terminal:
            return resource(found.kept, STATUS_OF[found.status.state])
        return await self.whole(found.queue, found.kept)

    async def whole(
        self, queue: Queue, kept: Kept, *, raises_failure: bool = False
    ) -> dict[str, Any]:
        """The body of the response at its end, for which this waits. See ResponseLog."""
        for _ in range(MAX_READINGS - 1):
            # Redis has lost a part of the log. Nothing of it has been used, so read it again.
            with contextlib.suppress(OutputRewound):
                return await self._read(queue, kept, raises_failure=raises_failure)
        return await self._read(queue, kept, raises_failure=raises_failure)

    async def context(self, response_id: str, caller: Caller) -> Context:
        """All items of a response that is to be continued: its input, then its output.

        With the pictures of its input. InvalidRequest or Refused, which name the field
        `previous_response_id`.
        """
        param = "previous_response_id"
        try:
            found = await self.find(response_id, caller)
            body = await self.body(found)
        except (UnknownRequest, ResultExpired):
            message = f"there is no response {response_id!r}, or it has expired"
            refusal = Refusal(400, "previous_response_not_found", message, param=param)
            raise Refused(refusal) from None
        if body["status"] not in ("completed", "incomplete"):
            message = f"the response is {body['status']}: only a completed one can be continued"
            raise InvalidRequest(f"body.{param}", message)
        digests = digests_of(found.kept.items)
        broker = found.queue.client.broker_of(response_id)
        pictures = await broker.pictures(digests) if digests else {}
        if not pictures.keys() >= set(digests):
            message = "the pictures of that response have expired: send all of its input again"
            raise InvalidRequest(f"body.{param}", message)
        return Context([*found.kept.items, *as_input(body["output"])], pictures)

    async def end(self, found: Found, *, within_seconds: float) -> None:
        """Cancel a response, and wait for its end, no longer than `within_seconds`."""
        client, response_id = found.queue.client, found.kept.id
        state = await client.cancel(response_id)
        if not state.is_terminal:
            with contextlib.suppress(QuireError):
                await client.result(response_id, timeout=within_seconds)

    async def delete(self, found: Found, *, within_seconds: float) -> None:
        """Delete a response; an open one is cancelled.

        It cannot be found from then on. Its output goes with it, unless its worker needs longer
        than `within_seconds` to end it. Then the output expires as any other, and so does the
        prompt if the queue keeps prompts.
        """
        client, response_id = found.queue.client, found.kept.id
        state = await client.discard(response_id)
        if not state.is_terminal:
            await self.end(found, within_seconds=within_seconds)
            await client.discard(response_id)

    async def _read(self, queue: Queue, kept: Kept, *, raises_failure: bool) -> dict[str, Any]:
        events = OutputEvents(kept)
        record = CallRecord(kept.id, "chat.completions")
        log = ResponseLog(queue.client, record, closing=self._closing)
        log.raises_failure = raises_failure
        async with contextlib.aclosing(log.updates(idle_seconds=float("inf"))) as updates:
            async for item in updates:
                assert item is not None, "there is no idle timeout"
                async with Turn() as turn:
                    for one in item[1]:
                        if isinstance(one, Completion):
                            _exhaust(events.ending(one))
                            return events.response(one)
                        _exhaust(events.chunk(one))
                        if turn.is_over:
                            await turn.next()
        raise AssertionError("a log that is followed ends with a completion")


def _exhaust(events: Iterable[Event]) -> None:
    for _ in events:
        pass
