"""Fetches the pictures that calls name by an address, from origins that the operator allows.

A caller chooses the address, so this process would otherwise connect to whatever a caller wants.
Only listed origins are asked, also after a redirect; each name must lead to a public address, which
is the one that is connected to; and bytes, time and pictures of a call are bounded.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import httpcore2

from quire.errors import InvalidRequest
from quire.wire.pictures import MAX_PICTURE_BYTES, MAX_REQUEST_BYTES, must_not_be_many
from service.gateway.settings import PictureSettings
from service.shared.http.addresses import CheckedBackend, host_of

#: The most calls that have fetched pictures in memory at once, each up to MAX_REQUEST_BYTES.
MAX_CALLS = 8
#: The most redirects of one picture.
MAX_REDIRECTS = 3
#: The longest address.
MAX_URL_LENGTH = 2048

_REDIRECTS = (301, 302, 303, 307, 308)
#: In the order of the path: the messages of a chat, and the items of a response.
_LISTS = ("messages", "input")

_Path = tuple[str | int, ...]


class _Address(NamedTuple):
    """An address in a body: the path of its field, and the text."""

    path: _Path
    url: str

    @property
    def field(self) -> str:
        return ".".join(map(str, ("body", *self.path)))


class PictureFetcher:
    """Fetches pictures for the calls of one gateway. A context manager.

    Follows redirects, and uses no proxy of the environment. Nothing is kept between two calls.
    """

    def __init__(self, settings: PictureSettings) -> None:
        self._origins = frozenset(settings.picture_origins)
        self._timeout_seconds = settings.picture_fetch_seconds
        self._turns = asyncio.Semaphore(MAX_CALLS)
        networks = [ipaddress.ip_network(text) for text in settings.picture_networks]
        self._pool = httpcore2.AsyncConnectionPool(
            network_backend=CheckedBackend(networks), max_connections=MAX_CALLS
        )

    async def __aenter__(self) -> "PictureFetcher":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    @contextlib.asynccontextmanager
    async def with_pictures(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The body with the bytes of pictures in place of their addresses.

        The bytes belong to the context: other calls may wait for its end. InvalidRequest names the
        field of the first picture that cannot be had. Without allowed origins the body stays as it
        is, and the check of it refuses addresses.
        """
        addresses = list(_addresses_in(body)) if self._origins else []
        if not addresses:
            yield body
            return
        for number, one in enumerate(addresses, start=1):
            must_not_be_many(number, one.field)
            self._check(one.url, one.field)
        give_up = asyncio.get_running_loop().time() + self._timeout_seconds
        try:
            async with asyncio.timeout_at(give_up):
                await self._turns.acquire()
        except TimeoutError:
            raise self._too_slow(addresses[0]) from None
        try:
            yield await self._replaced_all(body, addresses, give_up=give_up)
        finally:
            self._turns.release()

    async def _replaced_all(
        self, body: Mapping[str, Any], addresses: Sequence[_Address], *, give_up: float
    ) -> Mapping[str, Any]:
        """The body with the bytes at these addresses; equal ones are fetched once."""
        found, at = body, addresses[0]
        fetched: dict[str, bytes] = {}
        try:
            async with asyncio.timeout_at(give_up):
                for at in addresses:
                    if at.url not in fetched:
                        most = MAX_REQUEST_BYTES - sum(map(len, fetched.values()))
                        fetched[at.url] = await self._fetched(at, most=most)
                    found = _replaced(found, at.path, fetched[at.url])
        except TimeoutError:
            raise self._too_slow(at) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException,
                httpcore2.UnsupportedProtocol, OSError):  # fmt: skip
            # Not why: a caller would learn which names and ports there are.
            raise InvalidRequest(at.field, "cannot be fetched: no connection") from None
        return found

    async def _fetched(self, address: _Address, *, most: int) -> bytes:
        """The bytes of a picture, at most `most`. InvalidRequest."""
        url, most = address.url, min(most, MAX_PICTURE_BYTES)
        headers: dict[bytes | str, bytes | str] = {
            "accept": "image/png, image/jpeg, image/webp, image/gif",
            "accept-encoding": "identity",
            "user-agent": "quire-gateway",
        }
        for _ in range(MAX_REDIRECTS + 1):
            async with self._pool.stream("GET", url, headers=headers) as response:
                if response.status in _REDIRECTS:
                    url = _joined(url, _location_of(response.headers), address.field)
                    self._check(url, address.field)
                    continue
                if response.status != 200:
                    message = f"cannot be fetched: status {response.status}"
                    raise InvalidRequest(address.field, message)
                data = bytearray()
                async for part in response.aiter_stream():
                    data += part
                    if len(data) > most:
                        message = f"takes more than {most} bytes, which is too much"
                        raise InvalidRequest(address.field, message)
                return bytes(data)
        raise InvalidRequest(address.field, f"is redirected more than {MAX_REDIRECTS} times")

    def _too_slow(self, address: _Address) -> InvalidRequest:
        message = f"was not fetched within {self._timeout_seconds:g} seconds"
        return InvalidRequest(address.field, message)

    def _check(self, url: str, field: str) -> None:
        """InvalidRequest(field) unless this address may be asked."""
        if len(url) > MAX_URL_LENGTH:
            raise InvalidRequest(field, f"has more than {MAX_URL_LENGTH} characters")
        try:
            host_of(url, allows_http=True)
        except ValueError as error:
            raise InvalidRequest(field, str(error)) from None
        parts = urlsplit(url)
        if f"{parts.scheme}://{parts.netloc.lower()}" not in self._origins:
            message = "leads to an origin whose pictures are not fetched here: send a data URL"
            raise InvalidRequest(field, message)


def _addresses_in(body: Mapping[str, Any]) -> Iterator[_Address]:
    """The addresses of pictures in a body that nobody has checked, in their order."""
    for name in _LISTS:
        for index, message in enumerate(_list_in(body, name)):
            for number, part in enumerate(_list_in(message, "content")):
                path: _Path = (name, index, "content", number, "image_url")
                given = part.get("image_url") if isinstance(part, Mapping) else None
                if isinstance(given, Mapping):
                    path, given = (*path, "url"), given.get("url")
                if isinstance(given, str) and given[:5].lower() in ("http:", "https"):
                    yield _Address(path, given)


def _list_in(value: Any, name: str) -> Sequence[Any]:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else ()


def _replaced(value: Any, path: _Path, data: bytes) -> Any:
    """A copy of the value, as far as the path leads, with `data` at its end."""
    if not path:
        return data
    copied: Any = list(value) if isinstance(value, list) else dict(value)
    copied[path[0]] = _replaced(value[path[0]], path[1:], data)
    return copied


def _joined(url: str, location: str, field: str) -> str:
    """Where a redirect leads. InvalidRequest(field)."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise InvalidRequest(field, "is redirected to what is no address") from None


def _location_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    named = (value for name, value in headers if name.lower() == b"location")
    return next(named, b"").decode("ascii", errors="replace")
