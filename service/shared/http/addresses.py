"""Which addresses a process may call for others, and the connection to the one that was checked.

A name is resolved once for each connection. All its addresses are checked, and the connection is
made to one of them, not to the name: so a name server that changes its answer between the check and
the connection gains nothing. The certificate is checked for the name.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpcore2

#: An address of IPv4 or IPv6.
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: The network of all public addresses of IPv6 that belong to one receiver. Python counts others as
#: global that may lead inside: `fec0::/10` of a site, and those that contain an address of IPv4.
_PUBLIC_OF_IPV6 = ipaddress.ip_network("2000::/3")

#: Global networks whose addresses contain an address of IPv4, which may be a private one.
_CONTAINING_OTHERS = tuple(
    ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")
)


class AddressRefused(httpcore2.ConnectError):
    """The name leads to an address that may not be called."""


def host_of(url: str, *, allows_http: bool) -> str:
    """The host of a url. ValueError if it cannot be called, without the url."""
    parts = urlsplit(url)
    schemes = ("https", "http") if allows_http else ("https",)
    if parts.scheme not in schemes or not parts.hostname:
        advice = "" if allows_http else "; for http:// set allows_http"
        raise ValueError(f"a url must begin with {' or '.join(schemes)}:// and name a host{advice}")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("a url must have neither user, password nor fragment")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("a url must be ASCII, without spaces")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        # Each attempt would fail with an error of no connection.
        raise ValueError("a url must name a host whose parts have 1 to 63 characters") from None
    _ = parts.port
    return parts.hostname


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Whether this address may be called: a public one, or one of the allowed networks."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address.version == net.version and address in net for net in allowed):
        return True
    if any(address.version == net.version and address in net for net in _CONTAINING_OTHERS):
        return False
    if address.version == _PUBLIC_OF_IPV6.version and address not in _PUBLIC_OF_IPV6:
        return False
    return address.is_global and not address.is_multicast


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to checked addresses only. `allowed` are networks that are allowed in addition."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """AddressRefused if one of the addresses of the host is not allowed; ConnectError."""
        error: Exception = httpcore2.ConnectError("the name has no address")
        for address in await self._addresses(host, port):
            try:
                return await self._backend.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except httpcore2.ConnectError as found:
                error = found
        raise error

    async def _addresses(self, host: str, port: int) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore2.ConnectError(f"the name is not resolved: {error}") from error
        # An address of a link has a zone, as in `fe80::1%eth0`.
        found = [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows]
        for address in found:
            if not is_allowed(address, self._allowed):
                raise AddressRefused(f"the address {address} is not allowed")
        return list(dict.fromkeys(found))
