"""Pictures that are named by an address: fetched from allowed origins alone, within bounds."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore2
import pytest

from quire.errors import InvalidRequest
from service.gateway import pictures
from service.gateway.pictures import PictureFetcher
from service.gateway.settings import GatewaySettings
from tests.quire.picture_files import png, png_header, sha256
from tests.service.gateway.front import CHAT

RED, BLUE = png(color=b"\xff\0\0"), png(color=b"\0\0\xff")
LOOPBACK = ("127.0.0.0/8",)
URL = "body.messages.0.content.0.image_url.url"


class Site:
    """A server of files and redirects; keeps the paths that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.files: dict[str, bytes] = {"/red.png": RED, "/bomb.png": png_header(50_000, 50_000)}
        self.moved: dict[str, str] = {}
        #: While it is not set, answers wait.
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                site.headers.append(dict(self.headers.items()))
                site.may_answer.wait(60)
                data = site.files.get(self.path)
                status = 302 if self.path in site.moved else 404 if data is None else 200
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    if status == 302:
                        self.send_header("Location", site.moved[self.path])
                    self.end_headers()
                    self.wfile.write(data or b"")

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}]}


def fetch(site: Site, body: dict[str, Any], **settings: Any) -> Any:
    given = {"picture_origins": (site.origin,), "picture_networks": LOOPBACK, **settings}

    async def once() -> Any:
        fetcher = PictureFetcher(GatewaySettings(**given))
        async with fetcher, fetcher.with_pictures(body) as found:
            return found

    return asyncio.run(once())


def refused(site: Site, *urls: str, **settings: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as found:
        fetch(site, chat(*urls), **settings)
    assert site.origin not in found.value.message
    return found.value


def test_addresses_become_bytes_and_the_body_of_the_caller_stays(site):
    site.files["/blue.png"] = BLUE
    body = chat(f"{site.origin}/red.png", "data:image/png;base64,AA==", f"{site.origin}/blue.png")
    before = repr(body)
    parts = fetch(site, body)["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in parts] == [
        RED, "data:image/png;base64,AA==", BLUE,
    ]  # fmt: skip
    assert repr(body) == before
    assert site.asked == ["/red.png", "/blue.png"]
    assert all(one["accept-encoding"] == "identity" for one in site.headers)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": site.origin + "/x"}]}
    site.files["/x"] = RED
    assert fetch(site, {"input": [item]})["input"][0]["content"][0]["image_url"] == RED


def test_without_allowed_origins_nothing_is_asked(site):
    body = chat(f"{site.origin}/red.png")
    assert fetch(site, body, picture_origins=()) is body
    assert site.asked == []


def test_a_redirect_is_followed_within_the_allowed_origins(site):
    site.moved = {"/1": "/2", "/2": f"{site.origin}/3", "/3": "red.png"}
    found = fetch(site, chat(f"{site.origin}/1"))
    assert found["messages"][0]["content"][0]["image_url"]["url"] == RED
    site.moved["/0"] = "/1"
    assert "redirected more than 3 times" in refused(site, f"{site.origin}/0").message
    port = site.origin.rpartition(":")[2]
    for target in (
        f"http://localhost:{port}/red.png",
        "file:///etc/passwd",
        "//evil.example/",
        "",
        "//[",
    ):
        site.moved["/away"] = target
        asked = len(site.asked)
        assert refused(site, f"{site.origin}/away").field == URL
        assert len(site.asked) <= asked + 4


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/red.png",
        "https://127.0.0.1/red.png",
        "http://169.254.169.254/latest/meta-data",
        "http://user:secret@127.0.0.1/red.png",
        "http://127.0.0.1/red.png#fragment",
        "http:///red.png",
        "http://" + "a" * 3000,
        "http://exa mple/",
        "http://[::1/",
        "https://127.0.0.1.example.com/",
        "http://127.0.0.1\\@example.com/",
    ],
)
def test_another_address_is_refused_and_nobody_is_asked(site, url):
    assert refused(site, f"{site.origin}/red.png", url).field == URL.replace("t.0.i", "t.1.i")
    assert site.asked == []


def test_whoever_is_asked_is_who_was_checked():
    """The check and the connection read an address each in their own way."""
    origin = "http://good.example"
    pieces = (
        *("good.example", "evil.example", ":80", ":8443", "@", "/", "\\", "?", "#", ":", "//", ";"),
        *("%40", "%2f", "%5c", "%00", "[", "]", "[::1]", ".", "&", "=", "\t", " ", "\n", "%", "|"),
    )
    drawn = random.Random(0)
    fetcher = PictureFetcher(GatewaySettings(picture_origins=(origin,)))
    num_checked, num_fooled = 0, 0
    for _ in range(20_000):
        begin = drawn.choice((origin, "http://", "HTTP://"))
        url = begin + "".join(drawn.choices(pieces, k=drawn.randint(1, 5)))
        is_asked = False
        with contextlib.suppress(ValueError):
            asked = httpcore2.URL(url)
            is_asked = (asked.host, asked.port) == (b"good.example", None)
        # A check of how an address begins would be fooled by many of them.
        num_fooled += url.startswith(origin) and not is_asked
        with contextlib.suppress(InvalidRequest):
            fetcher._check(url, URL)
            num_checked += 1
            assert is_asked, url
    assert num_checked > 500 and num_fooled > 500


def test_a_name_that_leads_inside_is_refused_although_its_origin_is_allowed(site):
    assert "no connection" in refused(site, f"{site.origin}/red.png", picture_networks=()).message
    assert site.asked == []


def test_what_is_missing_too_long_or_too_slow_is_refused_by_its_field(site, monkeypatch):
    error = refused(site, f"{site.origin}/red.png", f"{site.origin}/none")
    assert (error.field, error.message) == (
        URL.replace("t.0.i", "t.1.i"), "cannot be fetched: status 404",
    )  # fmt: skip
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", len(RED))
    assert fetch(site, chat(f"{site.origin}/red.png"))
    site.files["/red.png"] = RED + b"x"
    assert "takes more than" in refused(site, f"{site.origin}/red.png").message
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 1 << 20)
    monkeypatch.setattr(pictures, "MAX_REQUEST_BYTES", 2 * len(RED))
    site.files["/again.png"] = RED + b"x"
    error = refused(site, f"{site.origin}/red.png", f"{site.origin}/again.png")
    assert error.field == URL.replace("t.0.i", "t.1.i")
    site.may_answer.clear()
    error = refused(site, f"{site.origin}/red.png", picture_fetch_seconds=0.2)
    assert error.message == "was not fetched within 0.2 seconds"


def test_equal_addresses_of_a_call_are_fetched_once(site):
    parts = fetch(site, chat(*[f"{site.origin}/red.png"] * 3))["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in parts] == [RED] * 3
    assert site.asked == ["/red.png"]


def test_a_call_holds_its_turn_for_as_long_as_it_holds_its_pictures(site, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_CALLS", 1)
    given = {"picture_origins": (site.origin,), "picture_networks": LOOPBACK}
    settings = GatewaySettings(**given, picture_fetch_seconds=0.2)
    body = chat(f"{site.origin}/red.png")

    async def scenario() -> None:
        async with PictureFetcher(settings) as fetcher:
            async with fetcher.with_pictures(body):
                with pytest.raises(InvalidRequest, match="was not fetched within"):
                    async with fetcher.with_pictures(body):
                        pass
            assert site.asked == ["/red.png"]
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    async with fetcher.with_pictures(body):
                        raise ZeroDivisionError

    asyncio.run(scenario())


def test_more_pictures_than_a_request_may_have_are_not_fetched(site):
    assert refused(site, *[f"{site.origin}/red.png"] * 33).field == URL.replace("t.0.i", "t.32.i")
    assert site.asked == []


@pytest.mark.parametrize("body", [{}, {"messages": 1}, {"messages": [1, {"content": [1, {}]}]},
                                  {"input": "http://x"}, chat("data:,")])  # fmt: skip
def test_other_bodies_are_left_to_their_check(site, body):
    assert fetch(site, body) is body


def test_calls_with_addresses_are_answered_and_repeated(start, site, fake):
    gateway = start(picture_origins=(site.origin,), picture_networks=LOOPBACK)
    body = chat(f"{site.origin}/red.png")
    first = gateway.ask("POST", CHAT, body, Idempotency_Key="k")
    again = gateway.ask("POST", CHAT, body, Idempotency_Key="k")
    assert first.status == 200 and again.request_id == first.request_id
    (request,) = fake.requests
    assert request.body["messages"][0]["content"] == [{"type": "image", "sha256": sha256(RED)}]
    site.files["/red.png"] = BLUE
    changed = gateway.ask("POST", CHAT, body, Idempotency_Key="k")
    assert (changed.status, changed.error["code"]) == (422, "idempotency_key_reused")
    part = {"type": "input_image", "image_url": f"{site.origin}/red.png"}
    reply = gateway.ask("POST", "/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert reply.status == 200
    bomb = gateway.ask("POST", CHAT, chat(f"{site.origin}/bomb.png"))
    assert (bomb.status, bomb.error["param"]) == (400, URL.removeprefix("body."))
