"""Parts of the urls that name several servers: sentinels, or nodes of a cluster.

    <scheme>://[user:password@]host:port[,host:port ...]/<path>[?<options>]

The options of `rediss://` that begin with `ssl_` mean the same as there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis.connection import parse_url

#: The schemes of urls that name sentinels, and whether the server uses TLS.
SENTINEL_SCHEMES: Mapping[str, bool] = {"redis+sentinel": False, "rediss+sentinel": True}

#: The schemes of urls that name nodes of a cluster, and whether the nodes use TLS.
CLUSTER_SCHEMES: Mapping[str, bool] = {"redis+cluster": False, "rediss+cluster": True}

#: The schemes of urls with several hosts, and what such a url is called.
_KINDS = dict.fromkeys(SENTINEL_SCHEMES, "sentinel") | dict.fromkeys(CLUSTER_SCHEMES, "cluster")

#: The prefix of every option for the server's TLS.
TLS_PREFIX = "ssl_"

_OUTSIDE_BRACKETS = re.compile(r"[^\[\]]*")
#: A name or an address, and a port. Checks only the brackets; connecting checks the rest.
_HOST = re.compile(rf"(\[[^\[\]]+\])?{_OUTSIDE_BRACKETS.pattern}")


def scheme_of(url: str) -> str:
    """What stands before `://`."""
    return url.partition("://")[0]


def is_cluster_url(url: str) -> bool:
    """Whether it names nodes of a cluster, see cluster/."""
    return scheme_of(url) in CLUSTER_SCHEMES


def is_sentinel_url(url: str) -> bool:
    """Whether it names sentinels, see sentinel.py."""
    return scheme_of(url) in SENTINEL_SCHEMES


def has_several_hosts(url: str) -> bool:
    """Whether a url with this scheme may name several hosts."""
    return scheme_of(url) in _KINDS


def parts_of(url: str) -> SplitResult:
    """Like `urlsplit`, but also for urls with several hosts. ValueError.

    Some versions of Python check brackets, and refuse an address in brackets beside other hosts.
    """
    if not has_several_hosts(url):
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


def addresses_of(parts: SplitResult, *, default_port: int) -> list[tuple[str, int]]:
    """The hosts and ports of a url with several hosts. ValueError."""
    _, _, hosts = parts.netloc.rpartition("@")
    return [_address(host, parts.scheme, default_port) for host in hosts.split(",")]


def credentials_of(parts: SplitResult) -> dict[str, str | None]:
    """The settings `username` and `password` of a url with several hosts; None if absent.

    They are those of the servers. Sentinels may have their own, as options.
    """
    user_and_password, _, _ = parts.netloc.rpartition("@")
    username, _, password = user_and_password.partition(":")
    return {"username": unquote(username) or None, "password": unquote(password) or None}


def tls_settings(
    parts: SplitResult, *, has_tls: bool, other_options: Collection[str] = ()
) -> dict[str, Any]:
    """The TLS options of a url. ValueError for an option that would have no effect."""
    names = set[str]()
    for name, values in parse_qs(parts.query, keep_blank_values=True).items():
        if name in other_options:
            continue
        if not name.startswith(TLS_PREFIX):
            raise ValueError(f"a {_KINDS[parts.scheme]} url has no option {name!r}")
        if not has_tls:
            scheme = f"rediss+{_KINDS[parts.scheme]}"
            raise ValueError(f"the option {name!r} is for the scheme {scheme}")
        if not all(values):
            raise ValueError(f"the option {name!r} has no value")
        names.add(name)
    # The TLS options mean the same as in the url of one server.
    settings: dict[str, Any] = parse_url(f"rediss://?{parts.query}")  # type: ignore[no-untyped-call]
    return {name: value for name, value in settings.items() if name in names}


def _address(host: str, scheme: str, default_port: int) -> tuple[str, int]:
    name, separator, port = host.rpartition(":")
    if not separator or port.endswith("]"):
        name, port = host, str(default_port)
    if not port.isdecimal():
        # Not quoted: if a password has a `/`, this is a part of the password.
        raise ValueError(f"in a {_KINDS[scheme]} url, write each host as host or host:port")
    name = name.strip("[]")
    must_be_host(name)
    return name, int(port)
