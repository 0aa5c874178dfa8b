"""The routes of responses and their handlers.

POST   /v1/responses                    a call: answered at its end, streamed, or in the background
GET    /v1/responses/{id}               its body now; at its end with `?wait=true`; `?stream=true`
DELETE /v1/responses/{id}
POST   /v1/responses/{id}/cancel
POST   /v1/responses/input_tokens       how many tokens its input has
GET    /v1/responses/{id}/input_items   what the model was given
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import structlog
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import UNAVAILABLE, InvalidRequest, QuireError, ResultExpired
from quire.openai.logprobs import compact
from quire.openai.requests import parse_body
from quire.openai.responses.call import ID_PREFIX, Kept
from quire.openai.responses.fields import read_fields
from quire.openai.responses.resource import resource
from quire.openai.responses.writing import written_response
from service.gateway.answers import Answer, encode_parts
from service.gateway.callers import ApiKeys, Caller
from service.gateway.complete_answers import CompleteAnswer
from service.gateway.cursors import LAST_EVENT_ID
from service.gateway.http.cors import REQUEST_ID
from service.gateway.http.lifecycle import Lifecycle
from service.gateway.http.middleware import Admission, Handler, RouteEndpoint, log_reason
from service.gateway.idempotency import CallRecord
from service.gateway.metrics import GatewayMetrics
from service.gateway.pages import number_in, page_body, page_of, part_of, switch_in
from service.gateway.pictures import PictureFetcher
from service.gateway.queue import Queue
from service.gateway.queues import Queues
from service.gateway.refusals import Refused, moved, refusal_of, with_headers
from service.gateway.requests import body_of, queue_options_of
from service.gateway.responses.kept import KeptResponses
from service.gateway.responses.log import ResponseLog
from service.gateway.responses.streaming import BEFORE_ALL, ResponseStream
from service.gateway.responses.submitting import Submitted, Submitting, in_response
from service.gateway.settings import GatewaySettings
from service.shared.http.tasks import HungUp, while_connected

PATH = "/v1/responses"

#: The label of these routes in the metrics.
ROUTE = "responses"

#: The most input items of one answer, and how many there are without a `limit`.
MAX_PAGE, DEFAULT_PAGE = 100, 20

#: How long a cancellation waits until the worker has ended the response.
CANCEL_SECONDS = 5.0

_Result = TypeVar("_Result")

_log = structlog.get_logger("service.gateway")


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """What the handlers use of their gateway. `admit` counts an answer as open."""

    settings: GatewaySettings
    keys: ApiKeys
    lifecycle: Lifecycle
    queues: Queues
    pictures: PictureFetcher
    metrics: GatewayMetrics
    admit: Admission


@dataclass(frozen=True, slots=True)
class _Ending:
    """What happens to a response whose caller goes, or gets no answer.

    `is_abandoned`: nobody comes back for it. `path`: where another gateway has the answer, relative
    to that of the call; None if it has not.
    """

    queue: Queue
    record: CallRecord
    is_abandoned: bool = False
    path: str | None = None


class _ResponseId(Convertor[str]):
    """The ids of responses in a path. Any other path below these is unknown, for every method."""

    regex = f"{ID_PREFIX}[^/]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("response", _ResponseId())


class Responses:
    """The handlers of one gateway. They hold no state."""

    def __init__(self, parts: ResponseParts) -> None:
        self._parts = parts
        self._kept = KeptResponses(parts.queues, closing=parts.lifecycle.closing)
        self._submitting = Submitting(
            parts.queues, self._kept, parts.pictures, reasoning=parts.settings.reasoning
        )

    def routes(self) -> list[Route]:
        """The routes, for the gateway's application."""
        admit = self._parts.admit
        return [
            self._route("POST", "", self._create, admit),
            self._route("POST", "/input_tokens", self._count, admit),
            self._route("GET", "/{id:response}", self._retrieve, admit),
            self._route("DELETE", "/{id:response}", self._delete, admit),
            self._route("POST", "/{id:response}/cancel", self._cancel, admit),
            self._route("GET", "/{id:response}/input_items", self._input_items, admit),
        ]

    async def _create(self, request: Request) -> Response:
        began = monotonic()
        caller, options = self._caller(request), queue_options_of(request)
        body = await self._body_of(request)
        fields, _ = read_fields(body)
        submitted = await self._submitting.submit(body, fields, caller, options, request.state.held)
        kept, record = submitted.kept, submitted.record
        if fields.background and not fields.stream:
            return await self._answer(record, resource(kept, "queued"))
        ending = _Ending(submitted.queue, record)
        if options.key is None and not fields.background:
            path = _path_of(submitted, is_stream=bool(fields.stream))
            ending = _Ending(submitted.queue, record, is_abandoned=True, path=path)
        if not fields.stream:
            return await self._whole(request, kept, ending, raises_failure=True)
        observe = self._parts.metrics.first_token_seconds.observe
        return self._stream(
            kept,
            ending,
            after=BEFORE_ALL if options.key is None else _after(request),
            raises_failure=not fields.background,
            on_first_token=lambda: observe(monotonic() - began),
        )

    async def _count(self, request: Request) -> Response:
        caller, options = self._caller(request), queue_options_of(request)
        body = await self._body_of(request)
        fields, _ = read_fields(body)
        for name in ("stream", "background"):
            if getattr(fields, name):
                raise InvalidRequest(f"body.{name}", "must be false: a number comes whole")
        held = request.state.held
        queue, record = await self._submitting.count(body, fields, caller, options, held)
        answer = Answer(queue.client, record, closing=self._parts.lifecycle.closing)
        ending = _Ending(queue, record, is_abandoned=True)
        (end,) = await self._waited(request, answer.whole(), ending)
        body = {"object": "response.input_tokens", "input_tokens": end.usage.prompt_tokens}
        return await self._answer(record, body)

    async def _retrieve(self, request: Request) -> Response:
        found = await self._kept.find(request.path_params["id"], self._caller(request))
        ending, query = _Ending(found.queue, _record_of(found.kept)), request.query_params
        if switch_in(query, "stream"):
            return self._stream(found.kept, ending, after=_after(request))
        if switch_in(query, "wait"):
            return await self._whole(request, found.kept, ending)
        return await self._answer(ending.record, await self._kept.body(found))

    async def _cancel(self, request: Request) -> Response:
        caller, response_id = self._caller(request), request.path_params["id"]
        found = await self._kept.find(response_id, caller)
        await self._kept.end(found, within_seconds=CANCEL_SECONDS)
        found = await self._kept.find(response_id, caller)
        return await self._answer(_record_of(found.kept), await self._kept.body(found))

    async def _delete(self, request: Request) -> Response:
        found = await self._kept.find(request.path_params["id"], self._caller(request))
        await self._kept.delete(found, within_seconds=CANCEL_SECONDS)
        body = {"id": found.kept.id, "object": "response", "deleted": True}
        return await self._answer(_record_of(found.kept), body)

    async def _input_items(self, request: Request) -> Response:
        found = await self._kept.find(request.path_params["id"], self._caller(request))
        page = page_of(request.query_params, longest=MAX_PAGE, default=DEFAULT_PAGE)
        body = page_body(part_of(found.kept.items, page), page)
        return await self._answer(_record_of(found.kept), body)

    # What the handlers share.

    def _route(self, method: str, path: str, handler: Handler, admit: Admission) -> Route:
        endpoint = RouteEndpoint(ROUTE, handler, metrics=self._parts.metrics, admit=admit)
        return Route(f"{PATH}{path}", endpoint, methods=[method])

    def _caller(self, request: Request) -> Caller:
        return self._parts.keys.caller(request.headers)

    async def _answer(self, record: CallRecord, body: dict[str, Any]) -> Response:
        return CompleteAnswer(
            await encode_parts(written_response(body, encode=compact)),
            headers={REQUEST_ID: record.id},
            patience_seconds=self._parts.settings.patience_seconds,
        )

    async def _whole(
        self, request: Request, kept: Kept, ending: _Ending, *, raises_failure: bool = False
    ) -> Response:
        """The body at the end of the response."""
        whole = self._kept.whole(ending.queue, kept, raises_failure=raises_failure)
        return await self._answer(ending.record, await self._waited(request, whole, ending))

    async def _waited(
        self, request: Request, whole: Coroutine[Any, Any, _Result], ending: _Ending
    ) -> _Result:
        """What comes at the end, for as long as the caller is connected."""
        try:
            return await while_connected(request.receive, whole)
        except HungUp:
            await self._hung_up(ending)
            raise
        except (QuireError, Refused) as error:
            log_reason(error)
            raise self._refused(ending, error) from error

    async def _body_of(self, request: Request) -> dict[str, Any]:
        settings = self._parts.settings
        data = await body_of(
            request,
            max_bytes=settings.max_body_bytes,
            timeout_seconds=settings.body_timeout_seconds,
        )
        return parse_body(data)

    def _stream(
        self,
        kept: Kept,
        ending: _Ending,
        *,
        after: int,
        raises_failure: bool = False,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> ResponseStream:
        parts = self._parts
        if after > BEFORE_ALL:
            parts.metrics.streams_resumed.inc()
        log = ResponseLog(ending.queue.client, ending.record, closing=parts.lifecycle.closing)
        log.raises_failure = raises_failure
        return ResponseStream(
            log,
            kept,
            after=after,
            patience_seconds=parts.settings.patience_seconds,
            headers={REQUEST_ID: kept.id},
            missing=ending.queue.models.missing,
            on_first_token=on_first_token,
            on_error=self._on_stream_error,
            refuse=partial(self._refused, ending),
            on_hang_up=partial(self._hung_up, ending),
        )

    async def _hung_up(self, ending: _Ending) -> None:
        outcome = "left"
        if ending.is_abandoned:
            outcome = "cancelled" if await ending.queue.abandon(ending.record) else "late"
            _log.info("caller hung up", request_id=ending.record.id, outcome=outcome)
        self._parts.metrics.hang_ups[outcome].inc()

    def _refused(self, ending: _Ending, error: QuireError | Refused) -> Refused:
        """The refusal for a caller whose answer has not begun yet; see `Gateway`."""
        error = in_response(error)
        if ending.is_abandoned:
            is_closing = self._parts.lifecycle.closing.is_set() and isinstance(error, Refused)
            if is_closing and isinstance(error, Refused) and ending.path is not None:
                error = moved(error.refusal, ending.path)
            elif is_closing or isinstance(error, (*UNAVAILABLE, ResultExpired)):
                ending.queue.abandon_later(ending.record)
        return with_headers(error, {REQUEST_ID: ending.record.id})

    async def _on_stream_error(self, error: QuireError | Refused) -> None:
        log_reason(error)
        self._parts.metrics.count_broken(refusal_of(error).code)


def _record_of(kept: Kept) -> CallRecord:
    return CallRecord(kept.id, "chat.completions")


def _path_of(submitted: Submitted, *, is_stream: bool) -> str | None:
    """Where another gateway has the answer, relative to the path of the call."""
    if not submitted.is_stored:
        return None
    return f"responses/{submitted.kept.id}?{'stream' if is_stream else 'wait'}=true"


def _after(request: Request) -> int:
    """The number of the last event that the caller has. InvalidRequest."""
    if "starting_after" in request.query_params:
        return number_in(request.query_params, "starting_after", BEFORE_ALL)
    return number_in(request.headers, LAST_EVENT_ID, BEFORE_ALL)
