"""Submits calls to the queue, finds them again and cancels them. Knows no HTTP."""

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from quire.client.client_async import AsyncClient
from quire.errors import UNAVAILABLE, QueueFull, QuireError, ResultExpired, UnknownRequest
from quire.wire.message import Message
from quire.wire.output import Activity, Completion, State
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, REQUEST_ID_PATTERN
from service.gateway.abandoned import AbandonedRequests
from service.gateway.callers import Caller
from service.gateway.idempotency import Call, CallRecord
from service.gateway.models import Models
from service.gateway.refusals import Refused, key_reused
from service.gateway.requests import QueueOptions

#: The tenant of callers that need no key.
DEFAULT_TENANT = "default"

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_log = structlog.get_logger("service.gateway")


def is_request_id(text: str) -> bool:
    """Whether a request can have this id."""
    return len(text) <= MAX_REQUEST_ID_LENGTH and bool(_REQUEST_ID.fullmatch(text))


class Queue:
    """The calls of a queue, and the models of its workers.

    Methods raise the client's QuireErrors, and Refused.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.models = Models(client)
        self._abandoned = AbandonedRequests(client.cancel)

    async def close(self) -> None:
        """Stop cancelling abandoned requests; those that remain are computed to their end."""
        await self._abandoned.close()

    async def submit(self, call: Call, caller: Caller, options: QueueOptions) -> CallRecord:
        """Submit the call, or find the earlier one with its idempotency key; returns its record.

        Refused if the earlier call with this key was a different one.
        """
        priority = caller.priority(options.priority)
        deadline_ms = None
        if options.deadline_seconds is not None:
            now_ms = await self.client.now_ms()
            deadline_ms = now_ms + max(1, int(1000 * options.deadline_seconds))
        seconds = options.target_latency_seconds
        target_ms = None if seconds is None else max(1, int(1000 * seconds))
        messages = await call.messages(
            tenant=caller.tenant or DEFAULT_TENANT,
            priority=priority,
            deadline_ms=deadline_ms,
            headers=dict(options.headers),
            session_id=options.session_id,
            target_latency_ms=target_ms,
        )
        if options.key is None:
            # If submitting fails, the caller does not know the ids of the requests that were
            # accepted, so they are cancelled.
            try:
                await self._send(call, messages)
            except QueueFull as full:
                await self._end_all(full.accepted)
                raise
            except UNAVAILABLE:
                self.abandon_later(call.record)
                raise
            return call.record
        # Submit the first one alone: if its id belongs to another call, the others must not follow.
        await self._send(call, messages[:1])
        try:
            record = await self.find(call.record.id, caller)
        except UnknownRequest as unknown:
            # The record existed a moment ago, so it has expired or Redis has lost it.
            raise ResultExpired(unknown.request_id) from unknown
        if record.digest != call.record.digest:
            raise Refused(key_reused())
        await self.client.submit_many(messages[1:])
        # What the record has stays: the caller may have a part of an answer that was read by it.
        own: dict[str, Any] = {name: getattr(call.record, name) for name in record.lacks}
        return replace(record, **own, lacks=())

    async def _send(self, call: Call, messages: Sequence[Message]) -> None:
        if call.kept:
            await self.client.submit_kept(messages, call.kept)
        else:
            await self.client.submit_many(messages)

    async def find(self, request_id: str, caller: Caller) -> CallRecord:
        """The call with this id. UnknownRequest if there is none, or if it is another tenant's."""
        if not is_request_id(request_id):
            raise UnknownRequest(request_id)
        handle = self.client.attach(request_id)
        status = await handle.status()
        if caller.tenant not in (None, status.tenant):
            raise UnknownRequest(request_id)
        metadata = status.metadata
        if status.state.is_terminal:
            async for item in handle.follow(after=status.published):
                if isinstance(item, Completion):
                    metadata = item.metadata
        return CallRecord.from_metadata(request_id, metadata, status.submitted_ms // 1000)

    async def find_whole(self, request_id: str, caller: Caller) -> CallRecord:
        """The call with this id, and all that its answer needs.

        UnknownRequest also if that was not kept, as that of a response with `store: false`.
        """
        record = await self.find(request_id, caller)
        if not record.lacks:
            return record
        data = await self.client.kept(request_id)
        if data is None:
            raise UnknownRequest(request_id)
        return record.with_kept(data)

    async def find_chat(self, request_id: str, caller: Caller) -> CallRecord:
        """As `find_whole`. UnknownRequest also for a call that is no chat."""
        record = await self.find_whole(request_id, caller)
        if not record.is_chat:
            raise UnknownRequest(request_id)
        return record

    async def end(self, record: CallRecord) -> State:
        """Cancel all choices; returns the state of the first one afterwards."""
        first, *others = record.member_ids
        await self._cancel(others)
        return await self.client.cancel(first)

    async def activity(self, record: CallRecord) -> Activity | None:
        """What the first choice does in its worker; None if none has it, or Redis fails."""
        with contextlib.suppress(QuireError):
            return (await self.client.status(record.member_ids[0])).activity
        return None

    async def abandon(self, record: CallRecord) -> bool:
        """Cancel a call that nobody waits for; False if Redis refuses now and it is done later."""
        return await self._end_all(record.member_ids)

    def abandon_later(self, record: CallRecord) -> None:
        """Cancel a call when Redis answers again; the call may never have reached it."""
        self._abandoned.add(record.member_ids)

    async def _end_all(self, request_ids: Sequence[str]) -> bool:
        for number, request_id in enumerate(request_ids):
            try:
                await self._cancel([request_id])
            except UNAVAILABLE:
                self._abandoned.add(request_ids[number:])
                return False
            except QuireError as error:
                # This request cannot be cancelled, and its caller has gone. Cancel the others.
                _log.error("request cannot be cancelled", request_id=request_id, error=str(error))
        return True

    async def _cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            try:
                await self.client.cancel(request_id)
            except UnknownRequest:
                # The request never reached the queue, or has expired.
                continue
