"""Connections to a Redis whose address is known to its sentinels, and may change.

    redis+sentinel://[user:password@]host:port[,host:port ...]/<service>[/<database>]

and `rediss+sentinel` where the server speaks TLS; then the options of `rediss://` that begin with
`ssl_` may follow, as in `?ssl_ca_certs=<file>`. The user and password are the server's; those of
the sentinels themselves, if they have any, follow as `?sentinel_username=..&sentinel_password=..`.
Sentinels are asked without TLS.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import redis.asyncio.sentinel
from redis.connection import parse_url
from redis.exceptions import RedisError
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

#: The schemes of such a url, and whether the server speaks TLS.
SCHEMES: Mapping[str, bool] = {"redis+sentinel": False, "rediss+sentinel": True}

#: Where a sentinel listens that names no port.
DEFAULT_PORT = 26379

#: The options of a url that are about the sentinels themselves.
OWN_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})

#: How every option begins that is about the server's TLS.
TLS_PREFIX = "ssl_"

_OUTSIDE_BRACKETS = re.compile(r"[^\[\]]*")
#: A name or an address, and a port; what they are is looked at by those who connect.
_HOST = re.compile(rf"(\[[^\[\]]+\])?{_OUTSIDE_BRACKETS.pattern}")

#: How long a sentinel may take to answer.
SENTINEL_SECONDS = 1.0

#: For how long the answer of the sentinels is believed while there are connections.
BELIEF_SECONDS = 1.0

#: Where sentinels are slow to answer, they are asked in no more than this share of the time.
_ASKING_SHARE = 0.1


class _WholeAnswers(SentinelManagedConnection):
    """A connection that is not used again once reading an answer from it was interrupted.

    The other connections of redis-py are closed then, but in its threaded ones through sentinels
    the rest of the answer stays, and the next caller takes it for its own.
    """

    def read_response(self, *positional: Any, **named: Any) -> Any:
        return super().read_response(*positional, **{"disconnect_on_error": True} | named)


class _SecureWholeAnswers(_WholeAnswers, SentinelManagedSSLConnection):
    """The same under TLS."""


class _Belief:
    """Until when what the sentinels said is believed. Of many who come then, one asks."""

    def __init__(self) -> None:
        self._until = time.monotonic() + BELIEF_SECONDS

    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """What is done meanwhile is the asking. Where nobody answers, all stays as it is."""
        began = time.monotonic()
        self._until = began + BELIEF_SECONDS
        try:
            with contextlib.suppress(RedisError):
                yield
        finally:
            now = time.monotonic()
            self._until = now + max(BELIEF_SECONDS, (now - began) / _ASKING_SHARE)


class _MasterPool(SentinelConnectionPool):
    """Connections to the server that is the master now, also where the one before is still there.

    redis-py asks the sentinels when it connects, and never again while a connection lasts. But they
    demote a server that lives only some ten seconds after they have promoted another one, as in a
    failover that an operator asked for, and all that it is told until then is lost.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)  # type: ignore[no-untyped-call]
        self._belief = _Belief()

    def get_connection(self, *positional: Any, **named: Any) -> Any:
        if self._belief.is_over():
            with self._belief.renewed():
                # Idle connections to another server are closed with it, those in use at their end.
                self.get_master_address()  # type: ignore[no-untyped-call]
        return super().get_connection(*positional, **named)


class _AsyncMasterPool(redis.asyncio.sentinel.SentinelConnectionPool):
    """The same for an event loop."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)  # type: ignore[no-untyped-call]
        self._belief = _Belief()

    async def get_connection(self, *positional: Any, **named: Any) -> Any:
        if self._belief.is_over():
            with self._belief.renewed():
                await self.get_master_address()  # type: ignore[no-untyped-call]
        return await super().get_connection(*positional, **named)  # type: ignore[no-untyped-call]

    async def release(self, connection: Any) -> None:
        if self.master_address != (connection.host, connection.port):
            await connection.disconnect(nowait=True)
        await super().release(connection)


#: By what asks the sentinels.
_POOLS = {Sentinel: _MasterPool, redis.asyncio.sentinel.Sentinel: _AsyncMasterPool}


def is_sentinel_url(url: str) -> bool:
    """Whether a url is one of those `connect_through_sentinels` takes."""
    return url.partition("://")[0] in SCHEMES


def parts_of(url: str) -> SplitResult:
    """What `urlsplit` says of any url, of one with several hosts, too.

    Versions of Python that look into brackets refuse an address in them beside other hosts.
    ValueError.
    """
    if not is_sentinel_url(url):
        return urlsplit(url)
    scheme, _, rest = url.partition("://")
    end = min(found for mark in "/?#" if (found := f"{rest}{mark}".find(mark)) >= 0)
    user, _, hosts = rest[:end].rpartition("@")
    if not _OUTSIDE_BRACKETS.fullmatch(user) or not all(map(_HOST.fullmatch, hosts.split(","))):
        raise ValueError("only an address is in brackets")
    return urlsplit(f"{scheme}://{rest[end:]}")._replace(netloc=rest[:end])


def must_be_host(name: str) -> None:
    """ValueError for what no resolver can be asked for: its error would be none of Redis.

    As where nothing stands between two dots because a variable was empty.
    """
    plain = unquote(name)
    try:
        plain.encode("idna")
        can_be_asked = "\0" not in plain
    except UnicodeError:
        can_be_asked = False
    if not can_be_asked:
        # Not quoted: where a password has a `/`, this is the password.
        raise ValueError("a url names a host that cannot be one")


def connect_through_sentinels(
    url: str, settings: Mapping[str, Any], *, make: Any = Sentinel
) -> Any:
    """A client of the server that is the master now, found again when another one is.

    `settings` are those of every connection to it; `make` is redis-py's Sentinel, or that of
    redis.asyncio for a client of its kind. ValueError for a url that cannot be right; whether there
    are TLS options of these names is for `refuse_unknown_options` to say.
    """
    parts = parts_of(url)
    server, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not hosts or not service or not (database or "0").isdecimal():
        raise ValueError("a sentinel url names hosts, a service, and a database by its number")
    username, _, password = server.partition(":")
    has_tls = SCHEMES[parts.scheme]
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    own = {
        "username": query.get("sentinel_username"),
        "password": query.get("sentinel_password"),
        "socket_timeout": SENTINEL_SECONDS,
        "socket_connect_timeout": SENTINEL_SECONDS,
    }
    if make is Sentinel:
        kind = _SecureWholeAnswers if has_tls else _WholeAnswers
        settings = {**settings, "connection_class": kind}
    sentinels = make([_address(host) for host in hosts.split(",")], sentinel_kwargs=own)
    return sentinels.master_for(
        service,
        connection_pool_class=_POOLS[make],
        db=int(database or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
        ssl=has_tls,
        **_tls_settings(parts.query, has_tls=has_tls),
        **settings,
    )


def _tls_settings(query: str, *, has_tls: bool) -> dict[str, Any]:
    """What the options of a url say about TLS. ValueError for any that nobody would heed."""
    names = set[str]()
    for name, values in parse_qs(query, keep_blank_values=True).items():
        if name in OWN_OPTIONS:
            continue
        if not name.startswith(TLS_PREFIX):
            raise ValueError(f"a sentinel url has no option {name!r}")
        if not has_tls:
            raise ValueError(f"the option {name!r} is for the scheme rediss+sentinel")
        if not all(values):
            raise ValueError(f"the option {name!r} has no value")
        names.add(name)
    # What they mean is what they mean in the url of one server.
    settings: dict[str, Any] = parse_url(f"rediss://?{query}")  # type: ignore[no-untyped-call]
    return {name: value for name, value in settings.items() if name in names}


def _address(host: str) -> tuple[str, int]:
    name, separator, port = host.rpartition(":")
    if not separator or port.endswith("]"):
        name, port = host, str(DEFAULT_PORT)
    if not port.isdecimal():
        # Not quoted: where a password has a `/`, this is the password.
        raise ValueError("a sentinel url names each host alone or with a port")
    name = name.strip("[]")
    must_be_host(name)
    return name, int(port)
