"""Submits calls to the queue, finds them again and ends them. Knows no HTTP."""

import re
from collections.abc import Iterable, Sequence

import structlog

from quire.client.async_client import AsyncClient
from quire.errors import BrokerUnavailable, QueueFull, QuireError, ResultExpired, UnknownRequest
from quire.wire.output import Completion, State
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, REQUEST_ID_PATTERN
from service.gateway.abandoned import REFUSED_FOR_NOW, Abandoned
from service.gateway.callers import Caller
from service.gateway.idempotency import Asked, Call
from service.gateway.refusals import Refused, key_reused
from service.gateway.requests import Treatment

#: The tenant of those who need no key.
USUAL_TENANT = "default"

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_log = structlog.get_logger("service.gateway")


class Queue:
    """The calls of a queue. Methods raise the QuireErrors of the client, and Refused."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._abandoned = Abandoned(client.cancel)

    async def close(self) -> None:
        """Stop cancelling abandoned requests; those that remain go on."""
        await self._abandoned.close()

    async def submit(self, call: Call, caller: Caller, treatment: Treatment) -> Asked:
        """Submit the call, or find the one that its idempotency key has begun; returns that.

        Refused if the key has begun a different call.
        """
        priority = caller.priority(treatment.priority)
        deadline_ms = None
        if treatment.deadline_seconds is not None:
            now_ms = await self._client.now_ms()
            deadline_ms = now_ms + max(1, int(1000 * treatment.deadline_seconds))
        members = await call.members(
            tenant=caller.tenant or USUAL_TENANT,
            priority=priority,
            deadline_ms=deadline_ms,
            headers=dict(treatment.headers),
        )
        if treatment.key is None:
            # If the submit fails, the caller cannot name the requests that were accepted: end them.
            try:
                await self._client.submit_many(members)
            except QueueFull as full:
                await self._end_all(full.accepted)
                raise
            except BrokerUnavailable:
                self.abandon_later(call.asked)
                raise
            return call.asked
        # The first one alone: if its id belongs to another call, the others must not be submitted.
        await self._client.submit_many(members[:1])
        try:
            asked = await self.find(call.asked.request_id, caller)
        except UnknownRequest as unknown:
            # It was there a moment ago.
            raise ResultExpired(unknown.request_id) from unknown
        if asked.digest != call.asked.digest:
            raise Refused(key_reused())
        await self._client.submit_many(members[1:])
        return asked

    async def find(self, request_id: str, caller: Caller) -> Asked:
        """The call with this id. UnknownRequest; also for a call of another tenant."""
        if len(request_id) > MAX_REQUEST_ID_LENGTH or not _REQUEST_ID.fullmatch(request_id):
            raise UnknownRequest(request_id)
        handle = self._client.attach(request_id)
        status = await handle.status()
        if caller.tenant not in (None, status.tenant):
            raise UnknownRequest(request_id)
        metadata = status.metadata
        if status.state.is_terminal:
            async for item in handle.follow(after=status.published):
                if isinstance(item, Completion):
                    metadata = item.metadata
        return Asked.from_metadata(request_id, metadata, status.submitted_ms // 1000)

    async def end(self, asked: Asked) -> State:
        """Cancel all choices; returns the state of the first after that."""
        first, *others = asked.member_ids
        await self._cancel(others)
        return await self._client.cancel(first)

    async def abandon(self, asked: Asked) -> bool:
        """Cancel a call nobody waits for; False if Redis refuses now and that is done later."""
        return await self._end_all(asked.member_ids)

    def abandon_later(self, asked: Asked) -> None:
        """The same when Redis is known to be away; it may not even have got the call."""
        self._abandoned.add(asked.member_ids)

    async def _end_all(self, request_ids: Sequence[str]) -> bool:
        for number, request_id in enumerate(request_ids):
            try:
                await self._cancel([request_id])
            except REFUSED_FOR_NOW:
                self._abandoned.add(request_ids[number:])
                return False
            except QuireError as error:
                # Nobody can end it, and nobody is left to be told; the others can be ended.
                _log.error("request cannot be ended", request_id=request_id, error=str(error))
        return True

    async def _cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            try:
                await self._client.cancel(request_id)
            except UnknownRequest:
                # It never reached the queue, or has expired.
                continue
