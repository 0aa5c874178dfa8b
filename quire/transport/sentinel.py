"""Connections to a Redis whose address its sentinels know, because it may change.

    redis+sentinel://[user:password@]host:port[,host:port ...]/<service>[/<database>]

and `rediss+sentinel` if the server uses TLS. Then the options of `rediss://` that begin with `ssl_`
may follow, as in `?ssl_ca_certs=<file>`. The user and password are those of the server. If the
sentinels have their own, add `?sentinel_username=..&sentinel_password=..`. The connections to the
sentinels do not use TLS.
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

#: The schemes of such a url, and whether the server uses TLS.
SCHEMES: Mapping[str, bool] = {"redis+sentinel": False, "rediss+sentinel": True}

#: The port of a sentinel without a port in the url.
DEFAULT_PORT = 26379

#: The options of a url for the sentinels themselves.
OWN_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})

#: The prefix of every option for the server's TLS.
TLS_PREFIX = "ssl_"

_OUTSIDE_BRACKETS = re.compile(r"[^\[\]]*")
#: A name or an address, and a port. Checks only the brackets; connecting checks the rest.
_HOST = re.compile(rf"(\[[^\[\]]+\])?{_OUTSIDE_BRACKETS.pattern}")

#: How long a sentinel may take to answer.
SENTINEL_SECONDS = 1.0

#: For how long an answer of the sentinels is used while there are connections.
BELIEF_SECONDS = 1.0

#: If sentinels are slow, queries to them take no more than this share of the time.
_ASKING_SHARE = 0.1


class _WholeAnswers(SentinelManagedConnection):
    """A connection that is closed if reading a reply from it was interrupted.

    redis-py closes its other connections in this case. But for threads and sentinels it keeps the
    rest of the reply, and the next caller would take it for its own.
    """

    def read_response(self, *positional: Any, **named: Any) -> Any:
        return super().read_response(*positional, **{"disconnect_on_error": True} | named)


class _SecureWholeAnswers(_WholeAnswers, SentinelManagedSSLConnection):
    """The same with TLS."""


class _Belief:
    """Until when the last answer of the sentinels is used. After that, one caller asks again."""

    def __init__(self) -> None:
        self._until = time.monotonic() + BELIEF_SECONDS

    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Ask the sentinels within this context. If none answers, nothing changes."""
        began = time.monotonic()
        self._until = began + BELIEF_SECONDS
        try:
            with contextlib.suppress(RedisError):
                yield
        finally:
            now = time.monotonic()
            self._until = now + max(BELIEF_SECONDS, (now - began) / _ASKING_SHARE)


class _MasterPool(SentinelConnectionPool):
    """Connections to the current master, also if the previous master is still alive.

    redis-py asks the sentinels only when it connects, and not while a connection lasts. In a
    failover that an operator starts, the sentinels demote the previous master only about ten
    seconds after they have promoted another one. All writes to it until then are lost.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)  # type: ignore[no-untyped-call]
        self._belief = _Belief()

    def get_connection(self, *positional: Any, **named: Any) -> Any:
        if self._belief.is_over():
            with self._belief.renewed():
                # If the master has changed, this closes idle connections; used ones close later.
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


#: The connection pool for each kind of sentinel client.
_POOLS = {Sentinel: _MasterPool, redis.asyncio.sentinel.Sentinel: _AsyncMasterPool}


def is_sentinel_url(url: str) -> bool:
    """Whether `connect_through_sentinels` takes this url."""
    return url.partition("://")[0] in SCHEMES


def parts_of(url: str) -> SplitResult:
    """Like `urlsplit`, but also for urls with several hosts. ValueError.

    Some versions of Python check brackets, and refuse an address in brackets beside other hosts.
    """
    if not is_sentinel_url(url):
        return urlsplit(url)
    scheme, _, rest = url.partition("://")
    end = min(found for mark in "/?#" if (found := f"{rest}{mark}".find(mark)) >= 0)
    user, _, hosts = rest[:end].rpartition("@")
    if not _OUTSIDE_BRACKETS.fullmatch(user) or not all(map(_HOST.fullmatch, hosts.split(","))):
        raise ValueError("only an address may be in brackets")
    return urlsplit(f"{scheme}://{rest[end:]}")._replace(netloc=rest[:end])


def must_be_host(name: str) -> None:
    """ValueError for a name that cannot be resolved, because the resolver's error is not Redis'.

    For example, nothing between two dots, because a variable was empty.
    """
    plain = unquote(name)
    try:
        plain.encode("idna")
        can_be_asked = "\0" not in plain
    except UnicodeError:
        can_be_asked = False
    if not can_be_asked:
        # Not quoted: if a password has a `/`, this is a part of the password.
        raise ValueError("the url has an invalid host name")


def connect_through_sentinels(
    url: str, settings: Mapping[str, Any], *, make: Any = Sentinel
) -> Any:
    """A client of the current master; it follows the master after a failover.

    `settings` are those of every connection to the server; `make` is the Sentinel of redis-py, or
    that of redis.asyncio for an async client. ValueError for an invalid url;
    `refuse_unknown_options` checks the names of TLS options.
    """
    parts = parts_of(url)
    server, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not hosts or not service or not (database or "0").isdecimal():
        raise ValueError("a sentinel url needs hosts and a service; a database must be a number")
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
    """The TLS options of a url. ValueError for an option that would have no effect."""
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
    # They mean the same as in the url of one server.
    settings: dict[str, Any] = parse_url(f"rediss://?{query}")  # type: ignore[no-untyped-call]
    return {name: value for name, value in settings.items() if name in names}


def _address(host: str) -> tuple[str, int]:
    name, separator, port = host.rpartition(":")
    if not separator or port.endswith("]"):
        name, port = host, str(DEFAULT_PORT)
    if not port.isdecimal():
        # Not quoted: if a password has a `/`, this is a part of the password.
        raise ValueError("in a sentinel url, write each host as host or host:port")
    name = name.strip("[]")
    must_be_host(name)
    return name, int(port)
