"""Suggests what may help if no server answers at a url: the other scheme, or to start one here.

A client with TLS waits in vain for a server without it. A server with TLS closes the connection of
a client without it. In both cases the error does not name the cause; the url helps to guess it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire.transport.connection import is_of_stranger

#: How what follows `://` begins if it names this machine.
_LOCAL = re.compile(r"(?:[^/?#]*@)?(?:127\.0\.0\.1|localhost|\[::1\])(?=[:/?#]|$)")


def url_hint(url: str, error: BaseException) -> str:
    """A clause to add to the message of the error; empty if neither is known to help.

    `error` is redis-py's, or ours with that as its cause.
    """
    scheme, _, place = url.partition("://")
    kind, plus, transport = scheme.partition("+")
    if kind == "rediss" and _may_lack_tls(error):
        return f"; if this server has no TLS, begin the url with `redis{plus}{transport}://`"
    if kind == "redis" and _may_need_tls(error):
        return f"; if this server has TLS, begin the url with `rediss{plus}{transport}://`"
    if _LOCAL.match(place) and any(
        isinstance(e, ConnectionRefusedError) for e in _with_causes(error)
    ):
        return "; start one: `quire serve` or `quire local`"
    return ""


def with_hint(url: str, error: BaseException) -> str:
    """The message of the error, with that clause."""
    hint = url_hint(url, error)
    return f"{error}".removesuffix("." if hint else "") + hint


def _may_lack_tls(error: BaseException) -> bool:
    """Whether the error is one that a client with TLS gets from a server without it."""
    for one in _with_causes(error):
        if isinstance(one, RedisConnectionError) and is_of_stranger(one):
            return False
        if isinstance(one, RedisTimeoutError) and "connecting" in str(one):
            return True
        if isinstance(one, ssl.SSLError):
            return True
    return False


def _may_need_tls(error: BaseException) -> bool:
    """Whether the error is one that a client without TLS gets from a server with it."""
    return any(
        isinstance(one, ConnectionResetError | InvalidResponse)
        or (isinstance(one, RedisConnectionError) and "closed by server" in str(one))
        for one in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
