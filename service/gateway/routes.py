"""The routes of the gateway, and what each of them does.

POST /v1/chat/completions, /v1/completions   a call; plain, or `stream: true`
GET  /v1/requests/{id}                       its whole answer, once more or after a crash
GET  /v1/requests/{id}/events                its stream after `Last-Event-ID`; 204 at its end
POST /v1/requests/{id}/cancel
GET  /v1/models, /v1/models/{name}
GET  /livez, /readyz, /metrics
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.client.async_client import AsyncClient
from quire.errors import BrokerUnavailable, QuireError, RequestFailed, ResultExpired
from quire.openai.answers import written_response
from quire.openai.requests import KINDS, parse_body
from quire.wire.protocol import Kind
from service.gateway.answers import Answer, in_turns
from service.gateway.callers import ApiKeys, Caller
from service.gateway.cursors import LAST_EVENT_ID, LastEvent, last_event_of
from service.gateway.http.cors import REQUEST_ID, for_pages_of
from service.gateway.http.lifecycle import Life
from service.gateway.http.middleware import (
    Admission,
    Door,
    Handler,
    LastCalls,
    log_reason,
    no_route,
)
from service.gateway.http.tasks import HungUp, while_connected
from service.gateway.idempotency import Asked, call_of
from service.gateway.metrics import GatewayMetrics
from service.gateway.models import Models
from service.gateway.queue import USUAL_TENANT, Queue
from service.gateway.refusals import Refused, moved, refusal_of, unknown_model, with_headers
from service.gateway.requests import body_of, telling_of, treatment_of
from service.gateway.settings import GatewaySettings
from service.gateway.streaming import EventStream
from service.gateway.whole_answers import WholeAnswer

#: How long a readiness check waits for Redis.
READY_SECONDS = 1.0

_log = structlog.get_logger("service.gateway")


class Gateway:
    """One gateway: `app` is what a server runs."""

    def __init__(
        self, client: AsyncClient, settings: GatewaySettings, *, keys: ApiKeys, life: Life
    ) -> None:
        self._client = client
        self._settings = settings
        self._keys = keys
        self._life = life
        self._queue = Queue(client)
        self._models = Models(client)
        self.metrics = GatewayMetrics(
            num_open=lambda: life.num_open, max_open=settings.max_open_answers
        )
        routes = Starlette(routes=self._routes(), exception_handlers={HTTPException: no_route})
        self.app = LastCalls(for_pages_of(settings.allowed_origins, routes), life=life)

    def _routes(self) -> list[Route]:
        def get(path: str, route: str, handler: Handler, admit: Admission | None = None) -> Route:
            # Of an application a route asks no method unless it is told one.
            door = Door(route, handler, metrics=self.metrics, admit=admit)
            return Route(path, door, methods=["GET"])

        def post(path: str, route: str, handler: Handler, admit: Admission | None = None) -> Route:
            door = Door(route, handler, metrics=self.metrics, admit=admit)
            return Route(path, door, methods=["POST"])

        admit = self._admitted
        return [
            *(post(path, kind, partial(self._call, kind), admit) for path, kind in KINDS.items()),
            get("/v1/requests/{id}", "requests", self._whole_again, admit),
            get("/v1/requests/{id}/events", "events", self._events, admit),
            post("/v1/requests/{id}/cancel", "cancel", self._cancel),
            get("/v1/models", "models", self._list_models),
            get("/v1/models/{name:path}", "models", self._show_model),
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/metrics", self._scrape),
        ]

    async def _call(self, kind: Kind, request: Request) -> Response:
        began = monotonic()
        caller, treatment = self._caller(request), treatment_of(request)
        body = parse_body(
            await body_of(
                request,
                max_bytes=self._settings.max_body_bytes,
                timeout_seconds=self._settings.body_timeout_seconds,
            )
        )
        telling = telling_of(body)
        call = call_of(
            kind,
            body,
            tenant=caller.tenant or USUAL_TENANT,
            key=treatment.key,
            model=await self._models.name_for(body.get("model"), body.get("adapter")),
            is_whole=not telling.is_stream,
        )
        asked = await self._queue.submit(call, caller, treatment)
        # A caller with a key can find its request again; one without cannot even name it.
        elsewhere = _path_from(request, asked) if treatment.key is None else None
        if not telling.is_stream:
            return await self._whole(request, asked, elsewhere=elsewhere)
        return self._stream(
            asked,
            # A repeated call may have received a part of the answer before.
            last=None if treatment.key is None else self._last_event(request, asked),
            include_usage=telling.include_usage,
            elsewhere=elsewhere,
            on_first_token=lambda: self.metrics.first_token_seconds.observe(monotonic() - began),
        )

    async def _whole_again(self, request: Request) -> Response:
        return await self._whole(request, await self._found(request))

    async def _events(self, request: Request) -> Response:
        asked = await self._found(request)
        return self._stream(
            asked,
            last=self._last_event(request, asked),
            include_usage=request.query_params.get("include_usage") == "true",
        )

    async def _cancel(self, request: Request) -> Response:
        asked = await self._found(request)
        state = await self._queue.end(asked)
        body = {"id": asked.request_id, "object": "request", "status": str(state)}
        return JSONResponse(body)

    async def _list_models(self, request: Request) -> Response:
        self._caller(request)
        models = [_model(name) for name in await self._models.names()]
        return JSONResponse({"object": "list", "data": models})

    async def _show_model(self, request: Request) -> Response:
        self._caller(request)
        name = request.path_params["name"]
        if name not in await self._models.names():
            raise Refused(unknown_model(f"no worker of this queue serves {name!r}"))
        return JSONResponse(_model(name))

    async def _livez(self, _: Request) -> Response:
        # A gateway lives if it answers. Were Redis checked, too, an outage would restart them all.
        return JSONResponse({"ok": True})

    async def _readyz(self, _: Request) -> Response:
        is_ready = not self._life.is_draining and await self._hears_redis()
        return JSONResponse({"ok": is_ready}, status_code=200 if is_ready else 503)

    async def _scrape(self, request: Request) -> Response:
        content, content_type = self.metrics.exposition(request.headers.get("Accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    # What the handlers share.

    def _caller(self, request: Request) -> Caller:
        return self._keys.caller(request.headers)

    def _admitted(self, request: Request) -> AbstractContextManager[None]:
        """A place for the answer to this request, among those of its tenant. Refused."""
        return self._life.admitted(self._caller(request).tenant or USUAL_TENANT)

    async def _found(self, request: Request) -> Asked:
        """The call whose id is in the path."""
        return await self._queue.find(request.path_params["id"], self._caller(request))

    def _last_event(self, request: Request, asked: Asked) -> LastEvent | None:
        """What the caller has; None for one that has nothing yet."""
        last = request.headers.get(LAST_EVENT_ID)
        return None if last is None else last_event_of(last, asked.num_choices)

    # `elsewhere` is given for calls without an idempotency key, whose answer nobody can ask for
    # once this caller has gone: the path, relative to the call's, at which any gateway has it.

    async def _whole(
        self, request: Request, asked: Asked, *, elsewhere: str | None = None
    ) -> Response:
        answer = Answer(self._client, asked, closing=self._life.closing)
        try:
            completions = await while_connected(request.receive, answer.whole())
        except HungUp:
            await self._hung_up(asked, elsewhere)
            raise
        except (QuireError, Refused) as error:
            log_reason(error)
            await self._end_others(asked, error)
            raise self._untold(asked, elsewhere, error) from error
        parts = written_response(asked.heading, completions, num_prompts=asked.num_prompts)
        return WholeAnswer(
            await in_turns(parts),
            headers={REQUEST_ID: asked.request_id},
            patience_seconds=self._settings.patience_seconds,
        )

    def _stream(
        self,
        asked: Asked,
        *,
        last: LastEvent | None,
        include_usage: bool,
        elsewhere: str | None = None,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> EventStream:
        if elsewhere is not None:
            elsewhere += "/events?include_usage=true" if include_usage else "/events"
        has_all = last is not None and last.has_all(include_usage=include_usage)
        if last is not None and not has_all:
            self.metrics.streams_resumed.inc()
        return EventStream(
            Answer(
                self._client,
                asked,
                closing=self._life.closing,
                places=None if last is None else last.places,
            ),
            is_resumed=last is not None,
            has_all=has_all,
            include_usage=include_usage,
            patience_seconds=self._settings.patience_seconds,
            headers={REQUEST_ID: asked.request_id},
            is_served=self._models.are_served,
            on_first_token=on_first_token,
            on_error=partial(self._stream_broke, asked),
            untold=partial(self._untold, asked, elsewhere),
            on_hang_up=partial(self._hung_up, asked, elsewhere),
        )

    async def _hung_up(self, asked: Asked, elsewhere: str | None) -> None:
        outcome = "left"
        if elsewhere is not None:
            outcome = "cancelled" if await self._queue.abandon(asked) else "late"
            _log.info("caller hung up", request_id=asked.request_id, outcome=outcome)
        self.metrics.hang_ups[outcome,].inc()

    def _untold(self, asked: Asked, elsewhere: str | None, error: QuireError | Refused) -> Refused:
        """The refusal for a caller that has received nothing of its answer yet.

        OpenAI's clients repeat a refused call. Without an idempotency key that makes a new request,
        so the old one is cancelled, or the caller is redirected to it at another gateway.
        """
        if elsewhere is not None:
            if isinstance(error, BrokerUnavailable | ResultExpired):
                self._queue.abandon_later(asked)
            elif self._life.closing.is_set() and isinstance(error, Refused):
                error = moved(error.refusal, elsewhere)
        return with_headers(error, {REQUEST_ID: asked.request_id})

    async def _stream_broke(self, asked: Asked, error: QuireError | Refused) -> None:
        log_reason(error)
        self.metrics.count_broken(refusal_of(error).code)
        await self._end_others(asked, error)

    async def _end_others(self, asked: Asked, error: QuireError | Refused) -> None:
        """Cancel the other choices when one has failed: the call has failed with it."""
        if isinstance(error, RequestFailed) and asked.num_choices > 1:
            await self._queue.abandon(asked)

    async def close(self) -> None:
        """Stop cancelling requests whose callers have gone."""
        await self._queue.close()

    async def _hears_redis(self) -> bool:
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._client.now_ms()
        except (QuireError, TimeoutError):
            return False
        return True


def _model(name: str) -> dict[str, object]:
    # The registry does not know when a model was created.
    return {"id": name, "object": "model", "created": 0, "owned_by": "quire"}


def _path_from(request: Request, asked: Asked) -> str:
    """Where the whole answer to a call is, relative to its path: a proxy may add a prefix."""
    depth = request.url.path.removeprefix("/v1/").count("/")
    return f"{'../' * depth}requests/{asked.request_id}"
