"""Wraps each route: counts responses, admits answers, and reports errors in OpenAI's form."""

import contextlib
import json
from collections.abc import Awaitable, Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import QuireError
from service.gateway.http.connection import with_close
from service.gateway.http.lifecycle import Life
from service.gateway.http.tasks import HungUp
from service.gateway.metrics import GatewayMetrics
from service.gateway.refusals import Refusal, Refused, refusal_of, unavailable

#: The status by which web servers count a response whose caller hung up.
STATUS_HUNG_UP = 499

Handler = Callable[[Request], Awaitable[Response]]

_log = structlog.get_logger("service.gateway")


#: Lets one request in while it lasts, or raises Refused.
Admission = Callable[[Request], contextlib.AbstractContextManager[None]]


class Door:
    """The ASGI application of one route. `admit` is given for routes that send an answer."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        *,
        metrics: GatewayMetrics,
        admit: Admission | None = None,
    ) -> None:
        self._route = route
        self._handler = handler
        self._metrics = metrics
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, from its headers to the end of its response."""
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._metrics.count_response(self._route, message["status"])
            await send(message)

        try:
            request = Request(scope, receive)
            with self._admit(request) if self._admit else contextlib.nullcontext():
                response = await self._handler(request)
                await response(scope, receive, counted)
        except HungUp:
            if not has_begun:
                self._metrics.count_response(self._route, STATUS_HUNG_UP)
        except (QuireError, Refused) as error:
            assert not has_begun, "a stream sends its errors itself"
            log_reason(error)
            await error_response(refusal_of(error))(scope, receive, counted)
        # A defect of ours ends one answer, and the log has the traceback.
        except Exception:
            _log.exception("defect", route=self._route)
            if has_begun:
                raise
            refusal = Refusal(500, "internal_error", "a defect of the gateway; its log has more")
            await error_response(refusal)(scope, receive, counted)


class LastCalls:
    """Wraps the whole application: closes connections after their response once it drains.

    Otherwise a client would come back over its kept-alive connection, past the load balancer.
    """

    def __init__(self, app: ASGIApp, *, life: Life) -> None:
        self._app = app
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._life.is_draining:
                message = with_close(message)
            await send(message)

        await self._app(scope, receive, closing)


def log_reason(error: QuireError | Refused) -> None:
    """Log why the queue does not answer, which callers are not told."""
    if not isinstance(error, Refused) and refusal_of(error) == unavailable():
        _log.warning("no answer from the queue", reason=str(error))


def error_response(refusal: Refusal) -> Response:
    """The response for a refusal."""
    # ASCII JSON: it may quote a caller's text, with surrogates that UTF-8 cannot encode.
    return Response(
        json.dumps(refusal.body),
        status_code=refusal.status,
        headers=dict(refusal.headers),
        media_type="application/json",
    )


async def no_route(request: Request, error: Exception) -> Response:
    """The response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers or {}
    if error.status_code == 405:
        message = f"{path} takes no {request.method}, but {headers.get('Allow', 'others')}"
        return error_response(Refusal(405, "method_not_allowed", message, headers=headers))
    message = f"there is no {path} here"
    return error_response(Refusal(error.status_code, "unknown_url", message, headers=headers))
