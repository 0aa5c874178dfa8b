"""The routes of the gateway and their handlers.

POST /v1/chat/completions, /v1/completions   a call, answered at once or with `stream: true`
POST /v1/embeddings                          a call, answered at once
/v1/responses and below                      see responses/routes.py
GET  /v1/chat/completions/{id}               the complete answer of a chat
GET  /v1/requests/{id}                       its complete answer, again or after a crash
GET  /v1/requests/{id}/events                its stream after `Last-Event-ID`; 204 at its end
POST /v1/requests/{id}/cancel
GET  /v1/models, /v1/models/{name}
GET  /livez, /readyz, /metrics
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.client.client_async import AsyncClient
from quire.errors import UNAVAILABLE, InvalidRequest, QuireError, RequestFailed, ResultExpired
from quire.openai.answers import written_response
from quire.openai.likelihoods import likelihood_form_of
from quire.openai.requests import KINDS, parse_body
from quire.openai.scores import SCORE_PATHS, ScoreForm, must_be_scores, scores_body, top_n_of
from quire.wire.pooling import is_pooled
from quire.wire.protocol import Kind, State
from service.gateway.answers import Answer, encode_parts
from service.gateway.batches.routes import routes_of
from service.gateway.callers import ApiKeys, Caller
from service.gateway.complete_answers import CompleteAnswer
from service.gateway.cursors import LAST_EVENT_ID, LastEvent, last_event_of
from service.gateway.http.cors import REQUEST_ID, for_pages_of
from service.gateway.http.lifecycle import Lifecycle
from service.gateway.http.middleware import (
    Admission,
    CloseWhenDraining,
    Handler,
    RouteEndpoint,
    log_reason,
    no_route,
)
from service.gateway.idempotency import CallRecord, call_of
from service.gateway.metrics import GatewayMetrics
from service.gateway.pictures import PictureFetcher
from service.gateway.queue import DEFAULT_TENANT, Queue
from service.gateway.queues import Queues
from service.gateway.refusals import Refused, moved, refusal_of, unknown_model, with_headers
from service.gateway.requests import (
    ResponseOptions,
    body_of,
    queue_options_of,
    response_options_of,
    shown_options,
    with_tier,
)
from service.gateway.responses.routes import ResponseParts, Responses
from service.gateway.settings import GatewaySettings
from service.gateway.streaming import EventStream
from service.shared.http.tasks import HungUp, while_connected
from service.shared.model_table import read_models

#: How long a readiness check waits for Redis.
READY_SECONDS = 1.0

_log = structlog.get_logger("service.gateway")


class Gateway:
    """One gateway: `app` is what a server runs."""

    def __init__(
        self, client: AsyncClient, settings: GatewaySettings, *, keys: ApiKeys, lifecycle: Lifecycle
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._lifecycle = lifecycle
        self._queues = Queues(client, settings, read_models(settings.models_file))
        self.metrics = GatewayMetrics(
            num_open=lambda: lifecycle.num_open, max_open=settings.max_open_answers
        )
        self._pictures = PictureFetcher(settings)
        shared = (settings, keys, lifecycle, self._queues, self._pictures, self.metrics)
        self._responses = Responses(ResponseParts(*shared, admit=self._admit))
        routes = Starlette(
            routes=self._routes(client), exception_handlers={HTTPException: no_route}
        )
        self.app = CloseWhenDraining(
            for_pages_of(settings.allowed_origins, routes), lifecycle=lifecycle
        )

    def _routes(self, client: AsyncClient) -> list[Route]:
        def get(path: str, route: str, handler: Handler, admit: Admission | None = None) -> Route:
            # Without `methods`, Starlette accepts every method for an ASGI application.
            endpoint = RouteEndpoint(route, handler, metrics=self.metrics, admit=admit)
            made = Route(path, endpoint, methods=["GET"])
            if admit is not None:
                # Starlette adds HEAD. The headers of an answer are not known before its end.
                made.methods = {"GET"}
            return made

        def post(path: str, route: str, handler: Handler, admit: Admission | None = None) -> Route:
            endpoint = RouteEndpoint(route, handler, metrics=self.metrics, admit=admit)
            return Route(path, endpoint, methods=["POST"])

        admit = self._admit
        batches = [
            Route(
                path,
                RouteEndpoint(
                    name, handler, metrics=self.metrics, admit=admit if is_open else None
                ),
                methods=[method],
            )
            for method, path, name, handler, is_open in routes_of(
                client, self._settings, caller_of=self._caller
            )
        ]
        return [
            *batches,
            *(post(path, kind, partial(self._call, kind), admit) for path, kind in KINDS.items()),
            *(
                post(path, "scores", partial(self._call, "scores", form=form), admit)
                for path, form in SCORE_PATHS.items()
            ),
            *self._responses.routes(),
            get("/v1/requests/{id}", "requests", self._show_answer, admit),
            get("/v1/chat/completions/{id}", "requests", self._show_chat, admit),
            get("/v1/requests/{id}/events", "events", self._events, admit),
            post("/v1/requests/{id}/cancel", "cancel", self._cancel),
            get("/v1/models", "models", self._list_models),
            get("/v1/models/{name:path}", "models", self._show_model),
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/metrics", self._scrape),
        ]

    async def _call(self, kind: Kind, request: Request, *, form: ScoreForm = "") -> Response:
        began = monotonic()
        caller, options = self._caller(request), queue_options_of(request)
        body = parse_body(
            await body_of(
                request,
                max_bytes=self._settings.max_body_bytes,
                timeout_seconds=self._settings.body_timeout_seconds,
            )
        )
        options, response_options = with_tier(options, body), response_options_of(body)
        top_n = top_n_of(body) if form == "rerank" else 0
        likelihoods = likelihood_form_of(body) if form == "classify" else None
        body = scores_body(form, body) if form else body
        target = await self._queues.target(body.get("model"), body.get("adapter"))
        request.state.held.enter_context(target.admitted())
        given = target.body(body)
        async with self._pictures.with_pictures(given) as whole:
            call = call_of(
                kind,
                whole,
                tenant=caller.tenant or DEFAULT_TENANT,
                key=options.key,
                model=target.model,
                is_streamed=response_options.is_stream,
                reasoning=self._settings.reasoning,
                form=form,
                top_n=top_n,
                likelihoods=likelihoods,
                given=given,
            )
            queue = target.queue
            if options.key is not None:
                # The model may have been served by another queue when the key was first used.
                queue = await self._queues.holding(call.record.id, default=queue)
            record = await queue.submit(call, caller, options)
            # With pictures they take megabytes, and the answer may take hours.
            del body, given, whole, call
        # A caller with an idempotency key finds its request by repeating the call. A caller
        # without one does not know the id of its request yet.
        answer_path = _path_from(request, record) if options.key is None else None
        if not response_options.is_stream:
            return await self._complete_answer(request, queue, record, answer_path=answer_path)
        return self._stream(
            queue,
            record,
            # The caller of a repeated call may already have a part of the answer.
            last=None if options.key is None else self._last_event(request, record),
            options=response_options,
            answer_path=answer_path,
            on_first_token=lambda: self.metrics.first_token_seconds.observe(monotonic() - began),
        )

    async def _show_answer(self, request: Request) -> Response:
        return await self._complete_answer(request, *await self._find(request, Queue.find_whole))

    async def _show_chat(self, request: Request) -> Response:
        return await self._complete_answer(request, *await self._find(request, Queue.find_chat))

    async def _events(self, request: Request) -> Response:
        queue, record = await self._find(request, Queue.find_whole)
        if is_pooled(record.kind):
            raise InvalidRequest("path", "a vector comes whole, and has no events")
        return self._stream(
            queue,
            record,
            last=self._last_event(request, record),
            options=shown_options(request.query_params),
        )

    async def _cancel(self, request: Request) -> Response:
        queue, record = await self._find(request)
        state = await queue.end(record)
        body = {"id": record.id, "object": "request", "status": str(state)}
        if state is State.RUNNING and (activity := await queue.activity(record)):
            body["activity"] = str(activity)
        return JSONResponse(body)

    async def _list_models(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"object": "list", "data": await self._queues.models()})

    async def _show_model(self, request: Request) -> Response:
        self._caller(request)
        name = request.path_params["name"]
        found = [model for model in await self._queues.models() if model["id"] == name]
        if not found:
            raise Refused(unknown_model(f"no worker of this queue serves {name!r}"))
        return JSONResponse(found[0])

    async def _livez(self, _: Request) -> Response:
        # A gateway is alive if it answers. If this checked Redis too, an outage of Redis would
        # restart all gateways.
        return JSONResponse({"ok": True})

    async def _readyz(self, _: Request) -> Response:
        if self._lifecycle.is_draining:
            reason = "this gateway drains"
        elif not await self._redis_answers():
            reason = "Redis does not answer"
        else:
            return JSONResponse({"ok": True})
        return JSONResponse({"ok": False, "reason": reason}, status_code=503)

    async def _scrape(self, request: Request) -> Response:
        content, content_type = self.metrics.exposition(request.headers.get("Accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    # What the handlers share.

    def _caller(self, request: Request) -> Caller:
        return self._keys.caller(request.headers)

    def _admit(self, request: Request) -> AbstractContextManager[None]:
        """Count the answer to this request as open, also for its tenant. Refused at a limit."""
        return self._lifecycle.admitted(self._caller(request).tenant or DEFAULT_TENANT)

    async def _find(
        self, request: Request, find: Callable[..., Awaitable[CallRecord]] = Queue.find
    ) -> tuple[Queue, CallRecord]:
        """The call whose id is in the path, and the queue that has it."""
        caller, request_id = self._caller(request), request.path_params["id"]
        queue = await self._queues.holding(request_id)
        return queue, await find(queue, request_id, caller)

    def _last_event(self, request: Request, record: CallRecord) -> LastEvent | None:
        """The last event that the caller has, from its header; None without the header."""
        last = request.headers.get(LAST_EVENT_ID)
        return None if last is None else last_event_of(last, record.num_choices)

    # `answer_path` is given for calls without an idempotency key: the path, relative to that of the
    # call, under which every gateway serves the answer. Once such a caller has gone, nobody asks
    # for its answer.

    async def _complete_answer(
        self, request: Request, queue: Queue, record: CallRecord, *, answer_path: str | None = None
    ) -> Response:
        answer = Answer(queue.client, record, closing=self._lifecycle.closing)
        try:
            completions = await while_connected(request.receive, answer.whole())
            must_be_scores(record.form, completions, likelihoods=record.likelihoods)
        except HungUp:
            await self._hung_up(queue, record, answer_path)
            raise
        except (QuireError, Refused) as error:
            log_reason(error)
            await self._end_others(queue, record, error)
            raise self._refuse_before_start(queue, record, answer_path, error) from error
        parts = written_response(
            record,
            completions,
            num_prompts=record.num_prompts,
            prompts=answer.prompts,
        )
        return CompleteAnswer(
            await encode_parts(parts),
            headers={REQUEST_ID: record.id},
            patience_seconds=self._settings.patience_seconds,
        )

    def _stream(
        self,
        queue: Queue,
        record: CallRecord,
        *,
        last: LastEvent | None,
        options: ResponseOptions,
        answer_path: str | None = None,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> EventStream:
        if answer_path is not None:
            answer_path += f"/events{options.query}"
        has_all = last is not None and last.has_all(include_usage=options.include_usage)
        if last is not None and not has_all:
            self.metrics.streams_resumed.inc()
        return EventStream(
            Answer(
                queue.client,
                record,
                closing=self._lifecycle.closing,
                cursors=None if last is None else last.cursors,
            ),
            is_resumed=last is not None,
            has_all=has_all,
            include_usage=options.include_usage,
            shows_usage_always=options.shows_usage_always,
            patience_seconds=self._settings.patience_seconds,
            headers={REQUEST_ID: record.id},
            missing=queue.models.missing,
            on_first_token=on_first_token,
            on_error=partial(self._on_stream_error, queue, record),
            refuse=partial(self._refuse_before_start, queue, record, answer_path),
            on_hang_up=partial(self._hung_up, queue, record, answer_path),
        )

    async def _hung_up(self, queue: Queue, record: CallRecord, answer_path: str | None) -> None:
        outcome = "left"
        if answer_path is not None:
            outcome = "cancelled" if await queue.abandon(record) else "late"
            _log.info("caller hung up", request_id=record.id, outcome=outcome)
        self.metrics.hang_ups[outcome].inc()

    def _refuse_before_start(
        self,
        queue: Queue,
        record: CallRecord,
        answer_path: str | None,
        error: QuireError | Refused,
    ) -> Refused:
        """The refusal for a caller whose response has not begun yet.

        OpenAI's clients repeat a refused call. Without an idempotency key the repeated call is a
        new request. So the old one is cancelled, or the caller is redirected to another gateway,
        which has its answer.
        """
        if answer_path is not None:
            if isinstance(error, (*UNAVAILABLE, ResultExpired)):
                queue.abandon_later(record)
            elif self._lifecycle.closing.is_set() and isinstance(error, Refused):
                error = moved(error.refusal, answer_path)
        return with_headers(error, {REQUEST_ID: record.id})

    async def _on_stream_error(
        self, queue: Queue, record: CallRecord, error: QuireError | Refused
    ) -> None:
        log_reason(error)
        self.metrics.count_broken(refusal_of(error).code)
        await self._end_others(queue, record, error)

    async def _end_others(
        self, queue: Queue, record: CallRecord, error: QuireError | Refused
    ) -> None:
        """Cancel the other choices when one has failed: the call has failed with it."""
        if isinstance(error, RequestFailed) and record.num_choices > 1:
            await queue.abandon(record)

    async def close(self) -> None:
        """Stop the tasks that cancel requests whose callers have gone."""
        await self._queues.close()
        await self._pictures.close()

    async def _redis_answers(self) -> bool:
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._queues.home.client.now_ms()
        except (QuireError, TimeoutError):
            return False
        return True


def _path_from(request: Request, record: CallRecord) -> str:
    """The path of the complete answer, relative to that of the call: a proxy may add a prefix."""
    depth = request.url.path.removeprefix("/v1/").count("/")
    return f"{'../' * depth}requests/{record.id}"
