"""Connections to a Redis whose address is known to its sentinels, and may change.

    redis+sentinel://[user:password@]host:port[,host:port ...]/<service>[/<database>]

and `rediss+sentinel` where the server speaks TLS; then the options of `rediss://` that begin with
`ssl_` may follow, as in `?ssl_ca_certs=<file>`. The user and password are the server's; those of
the sentinels themselves, if they have any, follow as `?sentinel_username=..&sentinel_password=..`.
Sentinels are asked without TLS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis.connection import parse_url
from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

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


class _WholeAnswers(SentinelManagedConnection):
    """A connection that is not used again once reading an answer from it was interrupted.

    The other connections of redis-py are closed then, but in its threaded ones through sentinels
    the rest of the answer stays, and the next caller takes it for its own.
    """

    def read_response(self, *positional: Any, **named: Any) -> Any:
        return super().read_response(*positional, **{"disconnect_on_error": True} | named)


class _SecureWholeAnswers(_WholeAnswers, SentinelManagedSSLConnection):
    """The same under TLS."""


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


def connect_through_sentinels(
    url: str, settings: Mapping[str, Any], *, make: Any = Sentinel
) -> Any:
    """A client of the server that is the master now, found again whenever it connects.

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
    return name.strip("[]"), int(port)
