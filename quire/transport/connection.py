"""Connections to Redis, and what their errors mean.

By default redis-py retries writes without telling the caller: after a short stall one XADD makes
two entries, and one XREADGROUP delivers entries twice and returns them once. So connections made
here never retry. `Retrying` repeats only what is safe to repeat, for a limited time.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult

import redis
import redis.asyncio
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from quire.errors import BrokerUnavailable, QueueFull, QuireError
from quire.transport.keepalive import keepalive_options
from quire.transport.urls import (
    CLUSTER_SCHEMES,
    SENTINEL_SCHEMES,
    has_several_hosts,
    is_cluster_url,
    is_sentinel_url,
    must_be_host,
    parts_of,
)

try:
    from redis import maint_notifications
except ImportError:
    maint_notifications = None  # type: ignore[assignment]

#: The longest time a read may block on the server. A blocked read may hang during a failover.
MAX_BLOCK_SECONDS = 2.0

#: By how much the socket timeout exceeds the longest blocking read.
SOCKET_MARGIN_SECONDS = 3.0

#: The most connections of one client: as many as a Redis accepts by default from all its clients.
#: Each thread in a blocking read uses one, and redis-py's default limit is 100.
MAX_CONNECTIONS = 10_000

#: The prefixes of server urls.
URL_SCHEMES = (
    *("redis://", "rediss://", "unix://"),
    *(f"{scheme}://" for scheme in (*SENTINEL_SCHEMES, *CLUSTER_SCHEMES)),
)

#: How long a TCP connect may take.
CONNECT_SECONDS = 3.0

#: The pause between two attempts doubles from the first value to the second.
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5

#: Errors that may pass: a lost connection, a loading or demoted server, a slot in migration or
#: without a node.
TRANSIENT = (
    RedisConnectionError,
    RedisTimeoutError,
    ReadOnlyError,
    MasterDownError,
    TryAgainError,
    ClusterDownError,
)

#: The error of a blocked read when its server becomes a replica.
_UNBLOCKED = "UNBLOCKED"

#: How the message for each kind of error begins; the first matching kind counts.
_SENTENCES: dict[type[RedisError], str] = {
    BusyLoadingError: "Redis is still loading its data",
    RedisConnectionError: "Redis cannot be reached",
    RedisTimeoutError: "Redis did not answer in time",
    NoPermissionError: "Redis does not allow the command for this user",
    MovedError: "the server is one node of a cluster, use a url with redis+cluster://",
    InvalidResponse: "the server that answers is not Redis",
    ResponseError: "Redis refused",
}

#: OpenSSL's text for a certificate that is not trusted.
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"

#: Redis' text for a database number that it does not have.
_NO_DATABASE = "DB index is out of range"

#: Redis' texts for a missing user or password.
_NOTHING_GIVEN = ("HELLO must be called", "Authentication required", "NOAUTH")

#: Turns notifications off. Older versions of redis-py do not have this setting.
_NO_NOTIFICATIONS = (
    {"maint_notifications_config": maint_notifications.MaintNotificationsConfig(enabled=False)}
    if maint_notifications is not None
    else {}
)


class UnknownScheme(ValueError):
    """A url with an unknown scheme. The message quotes nothing of the url."""


class UnusableFile(ValueError):
    """An unusable file of certificates or keys in a url. The message quotes only the file."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the url names a file that cannot be used: {message}")


def connect(url: str, *, block_seconds: float = MAX_BLOCK_SECONDS) -> redis.Redis:
    """A client that never retries by itself, for reads that block up to `block_seconds`.

    Takes `redis://`, `rediss://` (TLS; `?ssl_ca_certs=<file>` and similar options), `unix://`, the
    urls of sentinels, see sentinel.py, and those of a cluster, see cluster/. Sends nothing yet.
    For calls that do not block (heartbeats, commits) use `block_seconds=0`, so that a dead server
    is detected sooner. ValueError for an invalid url.
    """
    settings = connection_settings(url, block_seconds) | {"retry": Retry(NoBackoff(), 0)}
    # What most producers never need is loaded only for such a url.
    if is_cluster_url(url):
        from quire.transport.cluster.connection import connect_to_cluster

        client: redis.Redis = connect_to_cluster(url, settings)
    elif is_sentinel_url(url):
        from quire.transport.sentinel import connect_through_sentinels

        client = connect_through_sentinels(url, settings)
    else:
        client = redis.Redis.from_url(url, **settings)
    refuse_unknown_options(client)
    return client


def refuse_unknown_options(client: redis.Redis | redis.asyncio.Redis) -> None:
    """ValueError for an unknown or invalid option in the client's url.

    redis-py accepts any option, and would raise only at the first command. For a missing file it
    would say that the server cannot be reached.
    """
    pool = client.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, RedisError) as error:
        raise ValueError(f"the url has an invalid option: {error}") from error
    _refuse_unusable_files(pool.connection_kwargs)


def _refuse_unusable_files(settings: Mapping[str, Any]) -> None:
    # Checks the files as they are now. Each connection reads them again, so they may be replaced.
    authorities, key = settings.get("ssl_ca_certs"), settings.get("ssl_keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = f"ssl_ca_certs={authorities}"
    try:
        if authorities:
            context.load_verify_locations(authorities)
        if certificate := settings.get("ssl_certfile"):
            name = f"ssl_certfile={certificate}" + (f", ssl_keyfile={key}" if key else "")
            # Without a password OpenSSL would prompt for one at the terminal.
            context.load_cert_chain(certificate, key, settings.get("ssl_password") or "")
    except OSError as error:
        raise UnusableFile(f"{name}: {error.strerror or error}") from error


def connection_settings(url: str, block_seconds: float) -> dict[str, Any]:
    """The settings of every connection, in a thread or an event loop, except `retry`.

    ValueError for a url that cannot be parsed.
    """
    _take_apart(url)
    settings: dict[str, Any] = {
        # With notifications, a pool keeps a connection with unread data, which it takes for
        # notifications. The next caller would then read the replies to an interrupted call.
        **_NO_NOTIFICATIONS,
        "socket_timeout": block_seconds + SOCKET_MARGIN_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "decode_responses": False,
        "max_connections": MAX_CONNECTIONS,
    }
    if url.startswith("unix://"):
        # A unix socket cannot disappear silently, and redis-py has no keepalive for it.
        return settings
    return settings | {
        "socket_keepalive": True,
        "socket_keepalive_options": keepalive_options(),
    }


def _take_apart(url: str) -> None:
    if not url.startswith(URL_SCHEMES):
        raise UnknownScheme(f"the url must begin with one of {', '.join(URL_SCHEMES)}")
    try:
        parts = parts_of(url)
        if not has_several_hosts(url):
            _ = parts.port
            must_be_host(parts.hostname or "")
            _must_name_a_database(parts)
    except ValueError:
        # Not the message of the library: it quotes the host or the port, which contain a part of
        # the password if the password has a character that ends a host.
        message = "the url has an invalid host, port or database; in a password, quote special "
        raise ValueError(f"{message}characters, as `%2F` for `/`") from None


def _must_name_a_database(parts: SplitResult) -> None:
    """ValueError for a path that is not a number; redis-py would take it for database 0.

    If a password contains an `@` and then a `/`, the rest of it looks like the path, and the part
    between the two like the host.
    """
    database = parts.path.replace("/", "") or "0"
    if parts.scheme in ("redis", "rediss") and not database.isdecimal():
        raise ValueError("not a number")


def longest_block_of(connection: redis.Redis | redis.asyncio.Redis) -> float:
    """For how many seconds a read on this connection may block. ValueError if it is unusable.

    A read that blocks longer than the socket timeout would be sent again and again, and deliver
    entries each time.
    """
    timeout = socket_timeout_of(connection)
    if timeout is None:
        return MAX_BLOCK_SECONDS
    if timeout <= 0:
        raise ValueError("the connection's socket timeout must be positive")
    return min(MAX_BLOCK_SECONDS, timeout / 2)


def socket_timeout_of(connection: redis.Redis | redis.asyncio.Redis) -> float | None:
    """The socket timeout of the connection's pool. ValueError if the pool decodes replies."""
    settings = connection.connection_pool.connection_kwargs
    if settings.get("decode_responses"):
        raise ValueError("the connection must not decode responses: bodies are bytes")
    timeout = settings.get("socket_timeout")
    return float(timeout) if timeout is not None else None


class Attempts:
    """The attempts of one operation: whether there is another one, and after which pause.

    They continue for `seconds` from now; for an operation that may block for `wait_seconds`, from
    its first failure. The caller sleeps, because an event loop must not block.
    """

    # Independent of the seed of the program's `random`.
    _random = random.SystemRandom()

    def __init__(self, seconds: float, *, wait_seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._latest = time.monotonic() + wait_seconds + seconds
        self._give_up: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    def pause_after(self, error: RedisError) -> float:
        """Seconds until the next attempt. Raises a QuireError if there is none."""
        pause = self._pause
        now = time.monotonic()
        if self._give_up is None:
            self._give_up = min(self._latest, now + self._seconds)
        if not _may_pass(error) or now + pause >= self._give_up:
            raise translated(error) from error
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        # Jitter, so that many clients that lost the server together do not return together.
        return pause * self._random.uniform(0.5, 1.0)


def is_of_replica(error: RedisError) -> bool:
    """Whether the server reports that it is a replica, or becomes one.

    After a failover the name in the url resolves to another server, but existing connections stay
    with the old one, which gives this error for ever.
    """
    return isinstance(error, ReadOnlyError | MasterDownError) or _is_unblocked(error)


def is_of_stranger(error: RedisError) -> bool:
    """Whether the certificate of the server is not trusted."""
    return _UNTRUSTED in str(error)


def is_of_database(error: RedisError) -> bool:
    """Whether the server does not have the database of the url."""
    return _NO_DATABASE in str(error)


def translated(error: RedisError) -> QuireError:
    """The QuireError for an error of redis-py, which becomes its cause."""
    if isinstance(error, MasterNotFoundError | AsyncMasterNotFoundError):
        # After the message redis-py lists all settings of its connections, in some versions with
        # the passwords. Cut in the error itself, because a traceback prints the cause, too.
        error.args = (str(error).partition(" : ")[0],)
    ours: QuireError
    if isinstance(error, OutOfMemoryError):
        ours = QueueFull("Redis has no memory left", limit="memory")
    else:
        ours = BrokerUnavailable(_sentence(error))
    ours.__cause__ = error
    return ours


def _sentence(error: RedisError) -> str:
    """The message for people, with redis-py's own text if it adds something."""
    if isinstance(error, ReadOnlyError | MasterDownError):
        return "Redis takes no writes: it is a replica, or has become one"
    if isinstance(error, AuthenticationError):
        # Without a password the handshake fails, with a long text.
        if str(error).startswith(_NOTHING_GIVEN):
            return "Redis requires a password, and none was given"
        return f"Redis refused the user or password: {error}"
    if is_of_stranger(error):
        return f"the certificate of Redis is not trusted, see `ssl_ca_certs`: {error}"
    if is_of_database(error):
        return f"the url names a database that Redis does not have: {error}"
    for kind, text in _SENTENCES.items():
        if isinstance(error, kind):
            return f"{text}: {error}"
    return f"{type(error).__name__}: {error}"


def is_refused(error: QuireError) -> bool:
    """Whether it is a lasting error reply of the server, for example for a key of another type."""
    cause = error.__cause__
    return isinstance(cause, ResponseError) and not _may_pass(cause)


def may_pass(error: QuireError) -> bool:
    """Whether it is an outage of Redis that may end by itself."""
    cause = error.__cause__
    return isinstance(cause, RedisError) and _may_pass(cause)


def _may_pass(error: RedisError) -> bool:
    # In redis-py a refused password is a subclass of a connection error.
    may_pass = isinstance(error, TRANSIENT) and not isinstance(error, AuthenticationError)
    return may_pass or _is_unblocked(error)


def _is_unblocked(error: RedisError) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith(_UNBLOCKED)
