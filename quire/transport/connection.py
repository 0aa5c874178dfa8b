"""Connections to Redis, and the one place where an operation is tried again.

redis-py's defaults retry writes behind the caller's back: during a short stall one XADD makes two
entries, and one XREADGROUP delivers twice and shows once. So connections made here never retry, and
`Retrying` repeats only what is safe to repeat, for a bounded time.
"""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult

import redis
import redis.asyncio
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from quire.errors import BrokerUnavailable, QueueFull, QuireError
from quire.transport.sentinel import (
    SCHEMES,
    connect_through_sentinels,
    is_sentinel_url,
    must_be_host,
    parts_of,
)

try:
    from redis import maint_notifications
except ImportError:
    maint_notifications = None  # type: ignore[assignment]

#: The longest a read may block on the server. A blocked reader can hang across a failover.
MAX_BLOCK_SECONDS = 2.0

#: By how much a socket outlives the longest blocking read before it gives up.
SOCKET_MARGIN_SECONDS = 3.0

#: The most connections of one client: what a Redis takes from all of its clients, unless told. Each
#: thread that waits in a blocking read has one, and redis-py would refuse the hundred and first.
MAX_CONNECTIONS = 10_000

#: What the url of a server may begin with.
URL_SCHEMES = ("redis://", "rediss://", "unix://", *(f"{scheme}://" for scheme in SCHEMES))

#: How long a TCP connect may take.
CONNECT_SECONDS = 3.0

#: The pauses between two tries grow from the first to the second, doubling.
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5

#: What may pass by itself: a lost connection, a loading or demoted server, a slot in migration.
TRANSIENT = (
    RedisConnectionError,
    RedisTimeoutError,
    ReadOnlyError,
    MasterDownError,
    TryAgainError,
)

#: How a server that becomes a replica ends the reads that it has blocked.
_UNBLOCKED = "UNBLOCKED"

#: How the sentence about an error begins; the first kind that fits counts.
_SENTENCES: dict[type[RedisError], str] = {
    BusyLoadingError: "Redis still reads its data",
    RedisConnectionError: "Redis cannot be reached",
    RedisTimeoutError: "Redis did not answer in time",
    NoPermissionError: "Redis does not allow this user what was asked",
    InvalidResponse: "what answers there is not Redis",
    ResponseError: "Redis refused",
}

#: How OpenSSL says that the other side is not who it should be.
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"

#: How Redis says that it has no database of that number.
_NO_DATABASE = "DB index is out of range"

#: How Redis says that nobody has told it who is there.
_NOTHING_GIVEN = ("HELLO must be called", "Authentication required", "NOAUTH")

#: Versions of redis-py before there were any know no such setting.
_NO_NOTIFICATIONS = (
    {"maint_notifications_config": maint_notifications.MaintNotificationsConfig(enabled=False)}
    if maint_notifications is not None
    else {}
)

_Result = TypeVar("_Result")


class UnknownScheme(ValueError):
    """A url that begins with no scheme there is. The message has nothing of the url."""


class UnusableFile(ValueError):
    """A file of certificates or keys that a url names. The message has nothing else of the url."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the url names a file that cannot be used: {message}")


def connect(url: str, *, block_seconds: float = MAX_BLOCK_SECONDS) -> redis.Redis:
    """A client that never retries by itself and whose sockets outlive a read of `block_seconds`.

    Takes `redis://`, `rediss://` (TLS; `?ssl_ca_certs=<file>` and the like), `unix://` and the urls
    of sentinels, see sentinel.py. Nothing is sent yet. A connection used only for calls that do not
    block (heartbeats, commits) should be made with `block_seconds=0`, so that a dead server is
    noticed sooner. ValueError for a url that cannot be right.
    """
    settings = connection_settings(url, block_seconds) | {"retry": Retry(NoBackoff(), 0)}
    if is_sentinel_url(url):
        client: redis.Redis = connect_through_sentinels(url, settings)
    else:
        client = redis.Redis.from_url(url, **settings)
    refuse_unknown_options(client)
    return client


def refuse_unknown_options(client: redis.Redis | redis.asyncio.Redis) -> None:
    """ValueError for an option of the client's url that no connection takes, or not so.

    redis-py takes any, and would raise at the first command; of a file that is not there it would
    say that the server cannot be reached.
    """
    pool = client.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, RedisError) as error:
        raise ValueError(f"the url has an option that cannot be right: {error}") from error
    _refuse_unusable_files(pool.connection_kwargs)


def _refuse_unusable_files(settings: Mapping[str, Any]) -> None:
    # Whether they can be used now: each connection reads them anew, and so what took their place.
    authorities, key = settings.get("ssl_ca_certs"), settings.get("ssl_keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = f"ssl_ca_certs={authorities}"
    try:
        if authorities:
            context.load_verify_locations(authorities)
        if certificate := settings.get("ssl_certfile"):
            name = f"ssl_certfile={certificate}" + (f", ssl_keyfile={key}" if key else "")
            # With no password at all OpenSSL would ask for one at the terminal.
            context.load_cert_chain(certificate, key, settings.get("ssl_password") or "")
    except OSError as error:
        raise UnusableFile(f"{name}: {error.strerror or error}") from error


def connection_settings(url: str, block_seconds: float) -> dict[str, Any]:
    """What every connection is made with, in a thread or a loop, but the retry that is none.

    ValueError for a url that cannot be taken apart.
    """
    _take_apart(url)
    settings: dict[str, Any] = {
        # A pool that may be notified takes what is left on a connection for notifications. It would
        # give it to the next caller, whose answers were those to a call that was interrupted.
        **_NO_NOTIFICATIONS,
        "socket_timeout": block_seconds + SOCKET_MARGIN_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "decode_responses": False,
        "max_connections": MAX_CONNECTIONS,
    }
    if url.startswith("unix://"):
        # No machine and no wire that could go away without a word, and redis-py knows no keepalive.
        return settings
    return settings | {
        "socket_keepalive": True,
        "socket_keepalive_options": _keepalive_options(),
    }


def _take_apart(url: str) -> None:
    if not url.startswith(URL_SCHEMES):
        raise UnknownScheme(f"the url must begin with one of {', '.join(URL_SCHEMES)}")
    try:
        parts = parts_of(url)
        if not is_sentinel_url(url):
            _ = parts.port
            must_be_host(parts.hostname or "")
            _must_name_a_database(parts)
    except ValueError:
        # In words of its own: those of the library quote what it takes for a host or a port, and
        # where a password has a character that ends a host, that is the password.
        message = "the url has a host, a port or a database that cannot be right; a password in it "
        raise ValueError(f"{message}is quoted, as `%2F` for `/`") from None


def _must_name_a_database(parts: SplitResult) -> None:
    """ValueError for a path that is no number, which redis-py reads as that of database 0.

    Of a password with a `/` behind an `@` it is a part, and what lies between them the host.
    """
    database = parts.path.replace("/", "") or "0"
    if parts.scheme in ("redis", "rediss") and not database.isdecimal():
        raise ValueError("no number")


def longest_block_of(connection: redis.Redis | redis.asyncio.Redis) -> float:
    """The longest a read on this connection may block. ValueError for one we cannot work with.

    A read that outlives its socket would be sent again and again, and deliver each time.
    """
    timeout = socket_timeout_of(connection)
    if timeout is None:
        return MAX_BLOCK_SECONDS
    if timeout <= 0:
        raise ValueError("the connection's socket timeout must be positive")
    return min(MAX_BLOCK_SECONDS, timeout / 2)


def socket_timeout_of(connection: redis.Redis | redis.asyncio.Redis) -> float | None:
    """The socket timeout the connection's pool was made with. ValueError if it decodes replies."""
    settings = connection.connection_pool.connection_kwargs
    if settings.get("decode_responses"):
        raise ValueError("the connection must not decode responses: bodies are bytes")
    timeout = settings.get("socket_timeout")
    return float(timeout) if timeout is not None else None


class Retrying:
    """Runs operations against Redis and turns its errors into ours.

    A repeatable operation is tried again after a transient error, with growing pauses, for at most
    `seconds` in all; then, as at once for any other operation, BrokerUnavailable is raised. What an
    operation waits on the server for news is not counted: no fault of the server's takes that time.

    Idle connections of `connection` are closed when its server turns out to be a replica: whoever
    is tried next asks anew where its url leads.
    """

    def __init__(self, seconds: float, connection: redis.Redis | None = None) -> None:
        self.seconds = seconds
        self._connection = connection

    def __call__(
        self,
        operation: Callable[[], _Result],
        *,
        repeatable: bool = True,
        wait_seconds: float = 0.0,
    ) -> _Result:
        attempts = Attempts(self.seconds if repeatable else 0.0, wait_seconds=wait_seconds)
        while True:
            try:
                return operation()
            except RedisError as error:
                if self._connection is not None and is_of_replica(error):
                    self._connection.connection_pool.disconnect(inuse_connections=False)
                pause = attempts.pause_after(error)
            time.sleep(pause)


class Attempts:
    """The tries of one operation: whether there is another one, and after which pause.

    They go on for `seconds` from now; or, where one waits for up to `wait_seconds` on a server that
    is there, from its failure. It does not sleep itself, because an event loop must not.
    """

    # Seeded by the system, apart from the program's own random source.
    _random = random.SystemRandom()

    def __init__(self, seconds: float, *, wait_seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._latest = time.monotonic() + wait_seconds + seconds
        self._give_up: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    def pause_after(self, error: RedisError) -> float:
        """Seconds until the next try. Raises our error when there is none."""
        pause = self._pause
        now = time.monotonic()
        if self._give_up is None:
            self._give_up = min(self._latest, now + self._seconds)
        if not _may_pass(error) or now + pause >= self._give_up:
            raise translated(error) from error
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        # Jitter keeps a fleet that lost its server together from coming back together.
        return pause * self._random.uniform(0.5, 1.0)


def is_of_replica(error: RedisError) -> bool:
    """Whether the server says that it is a replica, or becomes one.

    After a failover the name in a url leads to another server, but what was connected before stays
    with the old one, which answers that for ever.
    """
    return isinstance(error, ReadOnlyError | MasterDownError) or _is_unblocked(error)


def is_of_stranger(error: RedisError) -> bool:
    """Whether the certificate there is not one that the url trusts."""
    return _UNTRUSTED in str(error)


def is_of_database(error: RedisError) -> bool:
    """Whether the server has no database of the number in the url."""
    return _NO_DATABASE in str(error)


def translated(error: RedisError) -> QuireError:
    """Our error for one of redis-py's, which stays its cause."""
    if isinstance(error, MasterNotFoundError | AsyncMasterNotFoundError):
        # Behind its sentence redis-py prints all settings of its connections, and some versions the
        # passwords, too. In the error itself, because whoever prints ours prints its cause.
        error.args = (str(error).partition(" : ")[0],)
    ours: QuireError
    if isinstance(error, OutOfMemoryError):
        ours = QueueFull("Redis has no memory left", limit="memory")
    else:
        ours = BrokerUnavailable(_sentence(error))
    ours.__cause__ = error
    return ours


def _sentence(error: RedisError) -> str:
    """What a person has to know of it; redis-py's own words where they add to that."""
    if isinstance(error, ReadOnlyError | MasterDownError):
        return "Redis takes no writes: it is a replica, or has become one"
    if isinstance(error, AuthenticationError):
        # Without any password the handshake is what fails, and says so at length.
        if str(error).startswith(_NOTHING_GIVEN):
            return "Redis wants a password, and was given none"
        return f"Redis wants another user or password: {error}"
    if is_of_stranger(error):
        return f"the certificate of Redis is not trusted, see `ssl_ca_certs`: {error}"
    if is_of_database(error):
        return f"the url names a database that Redis does not have: {error}"
    for kind, text in _SENTENCES.items():
        if isinstance(error, kind):
            return f"{text}: {error}"
    return f"{type(error).__name__}: {error}"


def is_refused(error: QuireError) -> bool:
    """Whether the server has answered so, and would again, as where a key has another type."""
    cause = error.__cause__
    return isinstance(cause, ResponseError) and not _may_pass(cause)


def may_pass(error: QuireError) -> bool:
    """Whether it tells of an outage of Redis, which may end without anybody's help."""
    cause = error.__cause__
    return isinstance(cause, RedisError) and _may_pass(cause)


def _may_pass(error: RedisError) -> bool:
    # To redis-py a refused password is a broken connection, too.
    may_pass = isinstance(error, TRANSIENT) and not isinstance(error, AuthenticationError)
    return may_pass or _is_unblocked(error)


def _is_unblocked(error: RedisError) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith(_UNBLOCKED)


def _keepalive_options() -> dict[int, int]:
    # The names differ between platforms; what is missing keeps the system's value.
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    return {
        getattr(socket, name): seconds for name, seconds in wanted.items() if hasattr(socket, name)
    }
