"""Lets pages of other origins use the gateway: cross-origin resource sharing (CORS).

A browser shows an answer to a page of another origin only if the answer allows it, and it asks with
an OPTIONS request, the preflight, before it sends a key. Preflights need no key: a browser sends
none with them.

Credentials in the sense of CORS, which are cookies and what a browser adds by itself, are never
allowed, since no caller of a gateway has any. A page sends its key as an `Authorization` header.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

#: The header that names the request; OpenAI's clients show it as `_request_id`.
REQUEST_ID = "X-Request-ID"

#: Allows the pages of every origin.
ANY_ORIGIN = "*"

#: What an origin looks like, as browsers write it: no path, no capital letters.
ORIGIN_PATTERN = r"^(\*|[a-z][a-z0-9+.-]*://[^\sA-Z/,*?#@]+)$"

#: Headers of responses that a page may read besides those that every page may.
EXPOSED_HEADERS = (REQUEST_ID, "Retry-After", "x-should-retry", "Allow", "WWW-Authenticate")

#: How long a browser may remember the answer to a preflight.
PREFLIGHT_SECONDS = 600


def for_pages_of(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The application, readable for the pages of these origins; without any, the same one."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        # Whatever a client library adds. `Authorization` has to be named in the answer, which
        # mirrors the names that were asked for.
        allow_headers=(ANY_ORIGIN,),
        allow_credentials=False,
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_SECONDS,
    )


def is_allowed(origin: str | None, origins: Sequence[str]) -> bool:
    """Whether the settings allow pages of this origin."""
    return origin is not None and (ANY_ORIGIN in origins or origin in origins)
