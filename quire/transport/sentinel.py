"""Connections to a Redis whose address its sentinels know, because it may change.

    redis+sentinel://[user:password@]host:port[,host:port ...]/<service>[/<database>]

and `rediss+sentinel` if the server uses TLS. Then the options of `rediss://` that begin with `ssl_`
may follow, as in `?ssl_ca_certs=<file>`. The user and password are those of the server. If the
sentinels have their own, add `?sentinel_username=..&sentinel_password=..`. The connections to the
sentinels do not use TLS.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

import redis.asyncio.sentinel
from redis.exceptions import RedisError
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from quire.transport.urls import (
    SENTINEL_SCHEMES,
    addresses_of,
    credentials_of,
    parts_of,
    tls_settings,
)

#: The port of a sentinel without a port in the url.
DEFAULT_PORT = 26379

#: The options of a url for the sentinels themselves.
OWN_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})

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


def connect_through_sentinels(
    url: str, settings: Mapping[str, Any], *, make: Any = Sentinel
) -> Any:
    """A client of the current master; it follows the master after a failover.

    `settings` are those of every connection to the server; `make` is the Sentinel of redis-py, or
    that of redis.asyncio for an async client. ValueError for an invalid url;
    `refuse_unknown_options` checks the names of TLS options.
    """
    parts = parts_of(url)
    _, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not hosts or not service or not (database or "0").isdecimal():
        raise ValueError("a sentinel url needs hosts and a service; a database must be a number")
    has_tls = SENTINEL_SCHEMES[parts.scheme]
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
    sentinels = make(addresses_of(parts, default_port=DEFAULT_PORT), sentinel_kwargs=own)
    return sentinels.master_for(
        service,
        connection_pool_class=_POOLS[make],
        db=int(database or 0),
        ssl=has_tls,
        **credentials_of(parts),
        **tls_settings(parts, has_tls=has_tls, other_options=OWN_OPTIONS),
        **settings,
    )
