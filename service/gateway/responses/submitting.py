"""Submits responses: from a body to a request in the queue, and what is kept of it. Knows no HTTP.

The id of a response is the id of its request. With an idempotency key it is a function of tenant
and key, so that every gateway finds the same response; without one it is random.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import InvalidRequest, QuireError, RequestFailed
from quire.openai.requests import OpenAIRequest
from quire.openai.responses.call import (
    ID_PREFIX,
    NAME_LENGTH,
    Kept,
    ResponseCall,
    call_of,
)
from quire.openai.responses.fields import Fields, path_in_response
from quire.openai.tools.reasoning import ReasoningSetting
from service.gateway.callers import Caller
from service.gateway.idempotency import Call, CallRecord
from service.gateway.pictures import PictureFetcher
from service.gateway.queue import DEFAULT_TENANT, Queue
from service.gateway.queues import Queues
from service.gateway.refusals import Refused, key_reused
from service.gateway.requests import QueueOptions, with_tier
from service.gateway.responses.kept import Context, KeptResponses

#: The ids of requests that count tokens: this, and a random name.
COUNT_PREFIX = "count_"

#: Fields of a body that change how the answer is sent and not what is generated.
_SENDING_FIELDS = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A response in the queue. `is_stored`: any gateway finds it again by its id."""

    queue: Queue
    record: CallRecord
    kept: Kept
    is_stored: bool


class Submitting:
    """Submits the responses of one gateway. It holds no state."""

    def __init__(
        self,
        queues: Queues,
        kept: KeptResponses,
        pictures: PictureFetcher,
        *,
        reasoning: ReasoningSetting,
    ) -> None:
        self._reasoning = reasoning
        self._pictures = pictures
        self._queues = queues
        self._kept = kept

    async def submit(
        self,
        body: Mapping[str, Any],
        fields: Fields,
        caller: Caller,
        options: QueueOptions,
        held: ExitStack,
    ) -> Submitted:
        """Submit a response, or find the earlier one with its idempotency key.

        `fields` are those of the body. `held` ends with the answer. Raises what `Queue.submit` and
        `KeptResponses.context` raise; errors name the fields of the body.
        """
        tenant = caller.tenant or DEFAULT_TENANT
        name, digest = _identity(body, tenant=tenant, key=options.key)
        if options.key is not None:
            found = await self._found(f"{ID_PREFIX}{name}", digest, caller)
            if found is not None:
                return found
        context = Context()
        if fields.previous_response_id is not None:
            context = await self._kept.context(fields.previous_response_id, caller)
        target = await self._queues.target(fields.model, body.get("adapter"))
        held.enter_context(target.admitted())
        queue = target.queue
        try:
            async with self._pictures.with_pictures(target.body(body)) as whole:
                described = call_of(
                    whole, name=name, context=context.items, pictures=context.pictures
                )
                call, kept = _call(
                    described,
                    name=name,
                    digest=digest,
                    model=target.model,
                    reasoning=self._reasoning,
                )
                record = await queue.submit(call, caller, with_tier(options, body))
                del whole, described, call
        except InvalidRequest as error:
            raise in_response(error) from None
        if options.key is not None and fields.is_stored:
            # Another call with this key may have been first.
            data = await queue.client.kept(record.id)
            kept = kept if data is None else Kept.decode(data)
        return Submitted(queue, record, kept, fields.is_stored)

    async def count(
        self,
        body: Mapping[str, Any],
        fields: Fields,
        caller: Caller,
        options: QueueOptions,
        held: ExitStack,
    ) -> tuple[Queue, CallRecord]:
        """Have a worker count the tokens of what a response would give to its model.

        Nothing is generated or kept. Arguments and errors are those of `submit`.
        """
        name, digest = _identity(body, tenant=caller.tenant or DEFAULT_TENANT, key=None)
        context = Context()
        if fields.previous_response_id is not None:
            context = await self._kept.context(fields.previous_response_id, caller)
        target = await self._queues.target(fields.model, body.get("adapter"))
        held.enter_context(target.admitted())
        try:
            async with self._pictures.with_pictures(target.body(body)) as whole:
                described = call_of(
                    whole, name=name, context=context.items, pictures=context.pictures
                )
                # For earlier versions, whose workers generate.
                chat = {**described.chat, "max_completion_tokens": 1, "min_tokens": None}
                request = OpenAIRequest("chat.completions", chat, digest)
                record = CallRecord(f"{COUNT_PREFIX}{name}", "chat.completions", model=target.model)
                call = Call(record, request, is_streamed=False, counts_only=True)
                # A count is no turn of the session, which it would hold up.
                once = replace(with_tier(options, body), key=None, session_id=None)
                return target.queue, await target.queue.submit(call, caller, once)
        except InvalidRequest as error:
            raise in_response(error) from None

    async def _found(self, response_id: str, digest: str, caller: Caller) -> Submitted | None:
        """The earlier response of a key; None without one. Refused if its call was different."""
        queue = await self._queues.holding(response_id)
        data = await queue.client.kept(response_id)
        if data is None:
            return None
        record = await queue.find(response_id, caller)
        if record.digest != digest[:32]:
            raise Refused(key_reused())
        return Submitted(queue, record, Kept.decode(data), is_stored=True)


def in_response(error: QuireError | Refused) -> QuireError | Refused:
    """The error with the field's path in the body of a response, if it names one of the chat."""
    if type(error) is InvalidRequest:
        return InvalidRequest(path_in_response(error.field), error.message)
    if isinstance(error, RequestFailed) and error.field is not None:
        field = path_in_response(error.field)
        return type(error)(error.code, error.message, field, completion=error.completion)
    return error


def _call(
    call: ResponseCall, *, name: str, digest: str, model: str, reasoning: ReasoningSetting
) -> tuple[Call, Kept]:
    """The call for the queue, and what is kept of it. InvalidRequest."""
    request = OpenAIRequest("chat.completions", call.chat, digest)
    record = CallRecord(
        id=f"{ID_PREFIX}{name}",
        kind="chat.completions",
        model=model,
        created=int(time.time()),
        digest=digest[:32],
        tools=request.tool_names,
        types=request.argument_types,
        reasoning=request.reasoning(reasoning),
    )
    kept = call.kept(record)
    data = b""
    if call.fields.is_stored:
        data = kept.encode()
    else:
        kept.check()
    is_streamed = bool(call.fields.stream)
    return Call(record, request, is_streamed, kept=data, is_response=True), kept


def _identity(body: Mapping[str, Any], *, tenant: str, key: str | None) -> tuple[str, str]:
    """The name of a response, and the digest of its call: both random without a key."""
    if key is None:
        digest = secrets.token_hex(32)
        return digest[:NAME_LENGTH], digest
    content = {name: value for name, value in body.items() if name not in _SENDING_FIELDS}
    return _sha256([tenant, key])[:NAME_LENGTH], _sha256([tenant, key, "responses", content])


def _sha256(value: object) -> str:
    try:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    # A body that could be parsed may still be nested too deep to serialize: that recurses further.
    except RecursionError as error:
        raise InvalidRequest("body", "is nested too deep") from error
