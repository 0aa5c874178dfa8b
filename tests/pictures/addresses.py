"""Addresses of pictures as attackers send them, and the servers that they lead to.

One server is allowed and hostile. The other one stands for what is inside of a network: its origin
is allowed as well, so that only the check of the address keeps a gateway from it. It answers
everybody with a good picture, and counts who asks.
"""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.pictures.hostile import Hostile
from tests.quire.picture_files import png, png_header

#: The time for all pictures of a call, in seconds.
FETCH_SECONDS = 0.5
#: How long a slow server waits before its next byte, in seconds.
DRIP_SECONDS = 0.05
_SITE, _INSIDE = "127.0.0.1", "127.0.0.2"
#: The address inside as other numbers that mean the same.
_NAMES_INSIDE = (_INSIDE, "2130706434", "0x7f000002", "0177.0.0.2", "127.2", "[::ffff:127.0.0.2]")
_NO_CONNECTION = "cannot be fetched: no connection"
_OTHER_ORIGIN = "leads to an origin whose pictures are not fetched here"

_Handler = BaseHTTPRequestHandler


class Sites:
    """Both servers, in threads. A context manager."""

    def __init__(self) -> None:
        self._is_closed = threading.Event()
        self._site, self._inside = _server(_SITE), _server(_INSIDE)
        self._inside_port = self._inside.server_address[1]
        #: How many requests have come to the server inside.
        self.num_inside = 0
        self._site.RequestHandlerClass = self._hostile()
        self._inside.RequestHandlerClass = self._good()

    def __enter__(self) -> Sites:
        for server in (self._site, self._inside):
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        for server in (self._site, self._inside):
            server.shutdown()
            server.server_close()

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings of a gateway that fetches from both."""
        origins = (self._origin, *self._origins_inside)
        networks = f"{_SITE}/32"
        seconds = ("--picture-fetch-seconds", str(FETCH_SECONDS))
        return ("--picture-origins", ",".join(origins), "--picture-networks", networks, *seconds)

    #: The picture of the good address.
    good = png()

    @property
    def good_part(self) -> dict[str, Any]:
        """A part with an address that is fetched."""
        return _part(f"{self._origin}/good")

    def hostile(self) -> Iterator[Hostile]:
        """Everything that must be refused, as messages with an address."""
        for origin in self._origins_inside:
            yield _chat(f"inside as {origin}", f"{origin}/good", _NO_CONNECTION)
        for url in self._other_origins():
            yield _chat(url, url, _OTHER_ORIGIN)
        host = self._origin.removeprefix("http://")
        for url, reason in (
            (f"http://user:secret@{host}/good", "neither user, password nor fragment"),
            (f"http://{host}\\@evil.example/good", "neither user, password nor fragment"),
            (f"http://{host}/good#fragment", "neither user, password nor fragment"),
            (f"http://{host}/{'a' * 3000}", "has more than 2048 characters"),
            (f"http://{host}/a b", "without spaces"),
        ):
            yield _chat(url[:60], url, reason)
        for path, (reason, _) in self._answers().items():
            yield _chat(f"a server with {path}", f"{self._origin}/{path}", reason)

    @property
    def _origin(self) -> str:
        return f"http://{_SITE}:{self._site.server_address[1]}"

    @property
    def _origins_inside(self) -> list[str]:
        return [f"http://{name}:{self._inside_port}" for name in _NAMES_INSIDE]

    def _other_origins(self) -> list[str]:
        port = self._site.server_address[1]
        return [
            *("http://169.254.169.254/latest/meta-data", f"http://{_SITE}:6379/", "https://[::1]/"),
            *(f"https://{_SITE}:{port}/good", f"http://{_SITE}.nip.example:{port}/good"),
            f"http://evil.example/?{self._origin}",
        ]

    def _answers(self) -> dict[str, tuple[str, Callable[[_Handler], None]]]:
        """By path: what a refusal says, and what the server does."""
        # Which bound comes first depends on the machine.
        bound = "takes more than|was not fetched within"
        late = "was not fetched within"
        inside = f"http://{_INSIDE}:{self._inside_port}/good"
        zipped = gzip.compress(bytes(1 << 24))
        link = f"http://169.254.169.254:{self._inside_port}/"
        return {
            "a-way-inside": (_NO_CONNECTION, _moved(inside)),
            "a-way-to-a-link": (_OTHER_ORIGIN, _moved(link)),
            "a-way-to-a-file": ("must begin with", _moved("file:///etc/passwd")),
            "a-way-to-itself": ("redirected more than", _moved("/a-way-to-itself")),
            "a-way-with-a-password": ("neither user", _moved(f"http://a:b@{_SITE}/")),
            "a-page": ("is none of PNG", _answer(b"<!doctype html>", "text/html")),
            "a-page-as-png": ("is none of PNG", _answer(b"<!doctype html>")),
            "a-bomb": ("60000 x 60000 pixels", _answer(png_header(60_000, 60_000))),
            "a-zipped-bomb": ("is none of PNG", _answer(zipped, coding="gzip")),
            "nothing": ("is none of PNG", _answer(b"")),
            "no-picture": ("status 404", _answer(png(), status=404)),
            "a-part": ("status 206", _answer(png(), status=206)),
            "less-than-it-says": (_NO_CONNECTION, _answer(png(), num_bytes=10_000)),
            "no-http": (_NO_CONNECTION, _raw(b"220 mail.example ESMTP\r\n")),
            "an-endless-body": (bound, self._endless(_OK + _CHUNKED, _PART)),
            "endless-headers": (f"{_NO_CONNECTION}|{late}", self._endless(_OK, _HEADER)),
            "endless-hints": (late, self._endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n")),
            "a-slow-body": (late, self._slow(_OK + b"\r\n", png())),
            "slow-headers": (late, self._slow(b"", _OK)),
        }

    def _endless(self, begin: bytes, part: bytes) -> Callable[[_Handler], None]:
        def answer(handler: _Handler) -> None:
            handler.wfile.write(begin)
            while not self._is_closed.is_set():
                handler.wfile.write(part)

        return answer

    def _slow(self, begin: bytes, rest: bytes) -> Callable[[_Handler], None]:
        """Sends a byte now and then, and never the last one."""

        def answer(handler: _Handler) -> None:
            handler.wfile.write(begin)
            for byte in rest[:-1]:
                handler.wfile.write(bytes([byte]))
                self._is_closed.wait(DRIP_SECONDS)
            self._is_closed.wait()

        return answer

    def _hostile(self) -> type[_Handler]:
        answers = {f"/{path}": answer for path, (_, answer) in self._answers().items()}
        answers["/good"] = _answer(png())

        class Hostile(_Quiet):
            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    answers[self.path](self)
                self.close_connection = True

        return Hostile

    def _good(self) -> type[_Handler]:
        sites = self

        class Good(_Quiet):
            def do_GET(self) -> None:
                sites.num_inside += 1
                _answer(png())(self)

        return Good


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass


_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
_PART = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
_HEADER = b"X-More: " + b"a" * 1000 + b"\r\n"


def _server(host: str) -> ThreadingHTTPServer:
    made = ThreadingHTTPServer((host, 0), _Quiet)
    made.daemon_threads = True
    return made


def _chat(name: str, url: str, reason: str) -> Hostile:
    return Hostile(name, [{"role": "user", "content": [_part(url)]}], reason)


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _moved(target: str) -> Callable[[_Handler], None]:
    return lambda handler: _send(handler, 302, b"", {"Location": target})


def _answer(
    data: bytes,
    kind: str = "image/png",
    *,
    status: int = 200,
    coding: str = "identity",
    num_bytes: int | None = None,
) -> Callable[[_Handler], None]:
    headers = {"Content-Type": kind, "Content-Encoding": coding}
    return lambda handler: _send(handler, status, data, headers, num_bytes)


def _raw(data: bytes) -> Callable[[_Handler], None]:
    def answer(handler: _Handler) -> None:
        handler.wfile.write(data)

    return answer


def _send(
    handler: _Handler,
    status: int,
    data: bytes,
    headers: dict[str, str],
    num_bytes: int | None = None,
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data) if num_bytes is None else num_bytes))
    handler.end_headers()
    handler.wfile.write(data)
