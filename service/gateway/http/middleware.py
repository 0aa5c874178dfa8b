"""Wraps the routes: counts responses, admits answers, and reports errors in OpenAI's form."""

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
from service.gateway.http.lifecycle import Lifecycle
from service.gateway.metrics import GatewayMetrics
from service.gateway.refusals import Refusal, Refused, refusal_of, unavailable
from service.shared.http.tasks import HungUp

#: The status under which web servers count a request whose caller disconnected.
STATUS_HUNG_UP = 499

#: The header by which a browser's preflight is known.
PREFLIGHT = "Access-Control-Request-Method"

Handler = Callable[[Request], Awaitable[Response]]

_log = structlog.get_logger("service.gateway")


#: Makes the context in which one answer counts as open. Entering it raises Refused at a limit.
Admission = Callable[[Request], contextlib.AbstractContextManager[None]]


class RouteEndpoint:
    """The ASGI application of one route. Routes that send an answer have an `admit`."""

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
            with contextlib.ExitStack() as held:
                # A handler may add what is to be held until the end of its response.
                request.state.held = held
                if self._admit:
                    held.enter_context(self._admit(request))
                response = await self._handler(request)
                await response(scope, receive, counted)
        except HungUp:
            if not has_begun:
                self._metrics.count_response(self._route, STATUS_HUNG_UP)
        except (QuireError, Refused) as error:
            assert not has_begun, "a stream sends its errors itself"
            log_reason(error)
            await error_response(refusal_of(error))(scope, receive, counted)
        # A defect of the gateway ends only this answer; the traceback is logged.
        except Exception:
            _log.exception("defect", route=self._route)
            if has_begun:
                raise
            refusal = Refusal(500, "internal_error", "a defect of the gateway; see its log")
            await error_response(refusal)(scope, receive, counted)


class CloseWhenDraining:
    """Wraps the application: while the gateway drains, responses have `Connection: close`.

    A client with a kept-alive connection would otherwise come back to this gateway, because the
    load balancer chooses a gateway only for new connections.
    """

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._lifecycle.is_draining:
                message = with_close(message)
            await send(message)

        await self._app(scope, receive, closing)


def log_reason(error: QuireError | Refused) -> None:
    """Log why Redis does not answer; callers do not see the reason."""
    if not isinstance(error, Refused) and refusal_of(error) == unavailable():
        _log.warning("no answer from the queue", reason=str(error))


def error_response(refusal: Refusal) -> Response:
    """The response for a refusal."""
    # JSON in ASCII, because a message may quote a caller's surrogates, which UTF-8 cannot encode.
    return Response(
        json.dumps(refusal.body),
        status_code=refusal.status,
        headers=dict(refusal.headers),
        media_type="application/json",
    )


async def no_route(request: Request, error: Exception) -> Response:
    """The response for an unknown path or method.

    OPTIONS asks which methods a path takes. A browser's preflight asks more than that: where this
    function gets one, no page of another origin is allowed.
    """
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers or {}
    if error.status_code == 405:
        allowed = headers.get("Allow", "other methods")
        if request.method == "OPTIONS" and PREFLIGHT not in request.headers:
            return Response(status_code=204, headers={"Allow": f"{allowed}, OPTIONS"})
        message = f"{path} does not take {request.method}; it takes {allowed}"
        return error_response(Refusal(405, "method_not_allowed", message, headers=headers))
    message = f"this gateway has no path {path}"
    return error_response(Refusal(error.status_code, "unknown_url", message, headers=headers))
