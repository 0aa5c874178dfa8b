"""The console as an ASGI application: routes, logins, pages, streams and error pages."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, unquote, urlencode

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from quire.errors import UNAVAILABLE, InvalidRequest, QuireError, UnknownRequest
from quire.queue.view.view import Part
from quire.version import quire_version
from service.console.access import User, Users, check_fetch, check_host
from service.console.actions import ACTIONS, Fields
from service.console.forms import (
    COOKIE,
    NOTICE_COOKIE,
    Tokens,
    fields_of,
    keep_cookie,
    session_of,
)
from service.console.headers import Headers
from service.console.pages import PAGES, PageKind, Watched, parameters_of, seen_by
from service.console.reading.history import NUM_SAMPLES, History
from service.console.reading.queue import QueueReading, views_of
from service.console.reading.request import Piece, piece_after
from service.console.reading.shared import SharedReads
from service.console.settings import ConsoleSettings
from service.console.streams import LiveStream
from service.console.views import STATIC, Views

#: How long a result is shared by pages that ask for the same.
FRESH_SECONDS = 0.5

#: How long a readiness check waits for Redis.
READY_SECONDS = 1.0

#: What Redis says of a command that its user may not run, itself or in a script.
FORBIDDEN = ("NOPERM", "can't run this command", "does not allow the command")

#: The media type that a browser asks for to keep a page up to date.
EVENTS = "text/event-stream"

_log = structlog.get_logger("service.console")


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a user: who it is, and the session of the browser."""

    user: User
    session: str
    token: str
    notice: str

    @property
    def may_write(self) -> bool:
        return self.user.is_operator


Handler = Callable[[Request, Visit], Awaitable[Response]]


class Console:
    """One console: `app` is what a server runs. For one event loop."""

    def __init__(
        self, queues: Sequence[QueueReading], settings: ConsoleSettings, users: Users
    ) -> None:
        self._settings = settings
        self._users = users
        self._tokens = Tokens()
        self._reads = SharedReads(fresh_seconds=FRESH_SECONDS)
        period = settings.history_seconds / NUM_SAMPLES
        self._watched = {
            queue.name: Watched(queue, History(queue, sample_seconds=period)) for queue in queues
        }
        self._views = Views(
            version=quire_version(),
            menu=[page for page in PAGES if page.title],
            queues=list(self._watched),
        )
        #: When set, all open streams end.
        self.closing = asyncio.Event()
        self._num_streams = 0
        self.app: ASGIApp = Headers(Starlette(routes=self._routes()))

    def _routes(self) -> list[Route | Mount]:
        def get(path: str, handler: Handler) -> Route:
            return Route(path, partial(self._answer, handler), methods=["GET"])

        return [
            get("/", self._front),
            get("/find", self._find),
            Route(
                "/queues/{queue}/actions/{action}",
                partial(self._answer, self._act),
                methods=["POST"],
            ),
            *(get(f"/queues/{{queue}}{page.path}", partial(self._show, page)) for page in PAGES),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/{path:path}", partial(self._answer, self._nowhere)),
        ]

    async def watch(self) -> None:
        """Samples the queues for the plots, until it is cancelled."""
        period = self._settings.history_seconds / NUM_SAMPLES
        while True:
            for name, watched in self._watched.items():
                try:
                    await self._reads.run(watched.history.read)
                except QuireError as error:
                    _log.warning("the queue cannot be sampled", queue=name, reason=str(error))
                # A defect must not end the plots of the other queues.
                except Exception:  # noqa: BLE001 - see above.
                    _log.exception("defect", queue=name)
            await asyncio.sleep(period)

    def close(self) -> None:
        """Ends the streams, and starts no more reads."""
        self.closing.set()
        self._reads.close()

    # What every page goes through.

    async def _answer(self, handler: Handler, request: Request) -> Response:
        visit = None
        try:
            check_host(request.headers.get("Host", ""), self._settings.allowed_hosts)
            check_fetch(request.headers, request.method)
            visit = self._visit(request)
            response = await handler(request, visit)
        except HTTPException as error:
            response = self._error_page(visit, error.status_code, error.detail, request)
            response.headers.update(error.headers or {})
        except UnknownRequest as error:
            response = self._error_page(visit, 404, str(error), request)
        except InvalidRequest as error:
            response = self._error_page(visit, 400, str(error), request)
        except QuireError as error:
            _log.warning("no answer from the queue", reason=str(error))
            status = 503 if isinstance(error, UNAVAILABLE) else 500
            if any(words in str(error) for words in FORBIDDEN):
                status = 403
            response = self._error_page(visit, status, str(error), request)
        # A defect of the console ends only this response; the traceback is logged.
        except Exception:  # noqa: BLE001 - see above.
            _log.exception("defect", path=request.url.path)
            detail = "A defect of the console; see its log."
            response = self._error_page(visit, 500, detail, request)
        if visit is not None and response.media_type == "text/html":
            is_secure = request.url.scheme == "https"
            if request.cookies.get(COOKIE) != visit.session:
                keep_cookie(response, COOKIE, visit.session, is_secure=is_secure)
            if visit.notice and response.status_code == 200:
                response.delete_cookie(NOTICE_COOKIE, httponly=True, samesite="strict")
        return response

    def _visit(self, request: Request) -> Visit:
        session = session_of(request)
        # A session that was made just now is known to no browser yet.
        known = session if request.cookies.get(COOKIE) == session else ""
        address = request.client.host if request.client is not None else ""
        user = self._users.user(request.headers, address=address, session=known)
        notice = unquote(request.cookies.get(NOTICE_COOKIE, ""))[:500]
        return Visit(user, session, self._tokens.token(session, user.name), notice)

    def _error_page(
        self, visit: Visit | None, status: int, detail: str, request: Request
    ) -> Response:
        context = {"visit": visit, "status": status, "detail": detail, "queue": None, "page": None}
        if visit is not None and (name := request.path_params.get("queue")) in self._watched:
            context["queue"] = name
        return HTMLResponse(self._views.page("error.html", context), status)

    # The pages.

    async def _front(self, _: Request, visit: Visit) -> Response:
        if len(self._watched) == 1:
            return RedirectResponse(f"/queues/{next(iter(self._watched))}", 303)
        queues = [watched.queue for watched in self._watched.values()]
        views = await self._reads.share("front", partial(views_of, queues, Part.SHARDS))
        context = {"visit": visit, "queue": None, "page": None, "views": views}
        return HTMLResponse(self._views.page("front.html", context))

    async def _find(self, request: Request, _: Visit) -> Response:
        """Leads to the page of a request or of a group; its name comes from a form."""
        name = self._queue_in(request.query_params.get("queue", "")).queue.name
        group = request.query_params.get("group", "").strip()
        if group:
            return RedirectResponse(f"/queues/{name}/groups/{quote(group, safe=':')}", 303)
        wanted = request.query_params.get("id", "").strip()
        if not wanted:
            return RedirectResponse(f"/queues/{name}/requests", 303)
        return RedirectResponse(f"/queues/{name}/requests/{quote(wanted, safe='~:')}", 303)

    async def _show(self, page: PageKind, request: Request, visit: Visit) -> Response:
        watched = self._queue_in(request.path_params["queue"])
        if "" in request.query_params.values():
            # A form sends its empty fields too; an address that people share has none.
            return RedirectResponse(_without_empty(request), 303)
        parameters = parameters_of(request, page, num_shards=len(watched.queue.brokers))

        async def context() -> Mapping[str, Any]:
            key = (page.name, watched.queue.name, parameters)
            found = await self._reads.share(key, partial(page.context, watched, parameters))
            common = {"visit": visit, "queue": watched.queue.name, "page": page}
            return {**common, "at": parameters, "refresh": self._settings.refresh_seconds, **found}

        if EVENTS not in request.headers.get("Accept", ""):
            return HTMLResponse(self._views.page(page.template, await context()))

        if self._num_streams >= self._settings.max_streams:
            raise HTTPException(503, "This console keeps as many pages up to date as it may.")

        async def render() -> str:
            return self._views.live(page.template, await context())

        broker = watched.queue.broker_of(parameters.request_id)

        async def read_text(seen: int) -> Piece:
            return await self._reads.run(partial(piece_after, broker, parameters.request_id, seen))

        return LiveStream(
            render,
            refresh_seconds=self._settings.refresh_seconds,
            closing=self.closing,
            open_one=self._open_stream(),
            read_text=read_text if page.has_output else None,
            seen=seen_by(request),
        )

    async def _act(self, request: Request, visit: Visit) -> Response:
        """Carries out what an operator asks for, and leads to the page that shows it."""
        queue = self._queue_in(request.path_params["queue"]).queue
        action = ACTIONS.get(request.path_params["action"])
        if action is None:
            raise HTTPException(404, "There is no such action.")
        if not visit.may_write:
            raise HTTPException(403, "Only operators may change a queue.")
        fields = Fields(await fields_of(request))
        self._tokens.check(request, fields.first, visit.user.name)
        about = {"action": action.__name__, "queue": queue.name, "user": visit.user.name}
        try:
            notice, path = await self._reads.run(partial(action, queue, fields))
        except QuireError as error:
            _log.warning("an action has failed", **about, reason=str(error))
            raise
        _log.info("an operator has acted", **about, done=notice)
        self._reads.forget()
        response = RedirectResponse(f"/queues/{queue.name}{quote(path, safe='/~:')}", 303)
        is_secure = request.url.scheme == "https"
        keep_cookie(response, NOTICE_COOKIE, quote(notice), is_secure=is_secure)
        return response

    async def _nowhere(self, request: Request, _: Visit) -> Response:
        raise HTTPException(404, f"There is no page {request.url.path}.")

    @contextlib.contextmanager
    def _open_stream(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def _queue_in(self, name: str) -> Watched:
        watched = self._watched.get(name)
        if watched is None:
            raise HTTPException(404, "This console does not show such a queue.")
        return watched

    async def _livez(self, _: Request) -> Response:
        # If this checked Redis too, an outage of Redis would restart the console.
        return JSONResponse({"ok": True})

    async def _readyz(self, _: Request) -> Response:
        broker = next(iter(self._watched.values())).queue.brokers[0]
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._reads.run(broker.now_ms)
        except (QuireError, TimeoutError):
            return JSONResponse({"ok": False}, 503)
        return JSONResponse({"ok": True})


def _without_empty(request: Request) -> str:
    """The address of a page without the empty fields of its query."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if value]
    return f"{quote(request.url.path)}?{urlencode(kept)}" if kept else quote(request.url.path)
