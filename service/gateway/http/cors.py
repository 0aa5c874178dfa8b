"""Lets pages of other origins use the gateway: cross-origin resource sharing (CORS).

A browser shows an answer to a page of another origin only if the answer allows it. Before a browser
sends a key, it asks for permission with an OPTIONS request, the preflight. Preflights need no key,
because browsers send none with them.

The gateway never allows credentials in the sense of CORS (cookies and others that a browser adds by
itself), because it uses none. A page sends its key as an `Authorization` header.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

#: The header that names the request; OpenAI's clients show it as `_request_id`.
REQUEST_ID = "X-Request-ID"

#: Allows the pages of every origin.
ANY_ORIGIN = "*"

#: The form of an origin as browsers write it: no path, no capital letters.
ORIGIN_PATTERN = r"^(\*|[a-z][a-z0-9+.-]*://[^\sA-Z/,*?#@]+)$"

#: Response headers that a page may read in addition to those that CORS always allows.
EXPOSED_HEADERS = (REQUEST_ID, "Retry-After", "x-should-retry", "Allow", "WWW-Authenticate")

#: How long a browser may reuse the answer to a preflight.
PREFLIGHT_SECONDS = 600


def for_pages_of(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The application with CORS for pages of these origins; unchanged without origins."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        # Client libraries add headers of their own, so every header is allowed. A `*` in the answer
        # would not cover `Authorization`, so the middleware repeats the names from the preflight.
        allow_headers=(ANY_ORIGIN,),
        allow_credentials=False,
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_SECONDS,
    )


def is_allowed(origin: str | None, origins: Sequence[str]) -> bool:
    """Whether the settings allow pages of this origin."""
    return origin is not None and (ANY_ORIGIN in origins or origin in origins)
