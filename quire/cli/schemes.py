"""Asks whether the scheme of a url is the right one, where a server does not answer.

Who speaks TLS to a server that does not is left waiting, and who does not speak it to one that does
is cut off: no error says why, and only who knows the url can guess.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire.transport.connection import is_of_stranger


def scheme_hint(url: str, error: BaseException) -> str:
    """A clause to stand behind what is said of the error; empty where the scheme is not to blame.

    `error` is redis-py's, or ours with that as its cause.
    """
    scheme, _, _ = url.partition("://")
    kind, plus, way = scheme.partition("+")
    if kind == "rediss" and _waits_in_vain(error):
        return f"; if it speaks no TLS there, the url begins with `redis{plus}{way}://`"
    if kind == "redis" and _is_cut_off(error):
        return f"; if it speaks TLS there, the url begins with `rediss{plus}{way}://`"
    return ""


def _waits_in_vain(error: BaseException) -> bool:
    """Whether TLS may have met a server that does not speak it."""
    for one in _behind(error):
        if isinstance(one, RedisConnectionError) and is_of_stranger(one):
            return False
        if isinstance(one, RedisTimeoutError) and "connecting" in str(one):
            return True
        if isinstance(one, ssl.SSLError):
            return True
    return False


def _is_cut_off(error: BaseException) -> bool:
    """Whether a server that speaks TLS may have met who does not."""
    return any(
        isinstance(one, ConnectionResetError | InvalidResponse)
        or (isinstance(one, RedisConnectionError) and "closed by server" in str(one))
        for one in _behind(error)
    )


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was made of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
