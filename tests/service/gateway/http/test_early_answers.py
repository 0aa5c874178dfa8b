"""An answer that does not wait for the whole body reaches a caller that sends all of it first."""

import http.client
import itertools
import json
import socket

import pytest

from service.gateway import server
from service.gateway.http import connection
from service.shared.http import heads
from tests.service.builders import PATIENCE_SECONDS, eventually
from tests.service.gateway.front import COMPLETIONS, Reply
from tests.service.gateway.http.test_slow_readers import connections_of
from tests.service.gateway.test_callers import SEARCH, bearer

MAX_BODY_BYTES = 1 << 20
BIG = 6 << 20
#: How often each is tried: a reset is a race, which the answer loses in every second try or third.
TRIES = 8


def post(port, body, path=COMPLETIONS, method="POST", **headers):
    """The reply that http.client reads once it has sent everything."""
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        caller.request(method, path, body=body, headers=names)
        answer = caller.getresponse()
        return Reply(answer.status, answer.headers, answer.read().decode())
    finally:
        caller.close()


def raw(port, *parts):
    """What a caller reads until the end that sends all parts first."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as caller:
        for part in parts:
            caller.sendall(part)
        return read_all(caller)


def read_all(caller):
    with caller.makefile("rb") as answer:
        return answer.read()


def head_of(method="POST", path=COMPLETIONS, **headers):
    names = {"Host": "x"} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}\r\n" for name, value in names.items()]
    return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


def chunks(size, each=1 << 16):
    """A body in the chunked encoding, without its end if there is none."""
    sizes = itertools.repeat(each) if size is None else itertools.repeat(each, size // each)
    for one in sizes:
        yield b"%x\r\n" % one + b"x" * one + b"\r\n"
    yield b"0\r\n\r\n"


@pytest.fixture
def small(start):
    return start(max_body_bytes=MAX_BODY_BYTES)


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 4 * MAX_BODY_BYTES, 30 * MAX_BODY_BYTES])
def test_a_body_above_the_limit_is_answered_however_far_above_it_is(small, size):
    body = b"x" * size
    for _ in range(TRIES):
        reply = post(small.port, body)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert reply.headers["Connection"] == "close"


def test_so_is_one_whose_length_nobody_has_announced(small):
    for _ in range(TRIES):
        reply = post(small.port, iter([b"x" * (1 << 18)] * 64))
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        answer = raw(small.port, head_of(Transfer_Encoding="chunked"), *chunks(BIG))
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_who_asks_before_it_sends_a_body_is_answered_before(small):
    head = head_of(Content_Length=BIG, Expect="100-continue")
    answer = raw(small.port, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nConnection: close\r\n".lower() in answer.lower()
    within = head_of(Content_Length=2, Expect="100-continue", Connection="close")
    assert raw(small.port, within, b"{}").startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 ")


def test_who_asks_before_it_sends_a_body_may_not_go_on_behind_a_refusal(gateway):
    # Whether such a caller sends the body after all, nobody can know.
    answer = raw(gateway.port, head_of(path="/nowhere", Content_Length=9, Expect="100-continue"))
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()


def refused(gateway, status, code, **request):
    """Whether every try is refused like this, with a body that is far from over."""
    for _ in range(TRIES):
        reply = post(gateway.port, b"x" * BIG, **request)
        assert (reply.status, reply.error["code"]) == (status, code)


def test_a_stranger_with_a_large_body_is_told(start, tmp_path):
    (tmp_path / "keys").write_text(f"{SEARCH} search\n")
    gateway = start(keys_file=tmp_path / "keys")
    refused(gateway, 401, "invalid_api_key")
    refused(gateway, 413, "body_too_large", **bearer(SEARCH))


def test_a_page_of_elsewhere_a_wrong_path_and_a_wrong_method_are_told(gateway):
    refused(gateway, 403, "origin_not_allowed", Origin="https://page.example")
    refused(gateway, 404, "unknown_url", path="/v1/translations")
    refused(gateway, 405, "method_not_allowed", path="/v1/models")


@pytest.mark.parametrize(
    ("settings", "status", "code"),
    [
        ({"max_open_answers": 1}, 503, "gateway_full"),
        ({"max_open_answers_per_tenant": 1}, 429, "too_many_open_answers"),
    ],
)
def test_one_for_whom_there_is_no_room_is_told(start, script, settings, status, code):
    gateway = start(**settings)
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        refused(gateway, status, code)


def test_one_that_comes_while_the_gateway_drains_is_told(gateway, script):
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        gateway.server._lifecycle.drain()
        refused(gateway, 503, "gateway_draining")


def test_headers_that_are_too_large_are_told(gateway):
    for _ in range(TRIES):
        answer = raw(gateway.port, head_of(X_Long="x" * BIG))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["message"] == "the headers of the request are too large"


def test_headers_that_do_not_come_to_an_end_are_not_waited_for(gateway, monkeypatch):
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    begun = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    for before in (b"", begun + b"\r\n"):
        answer = raw(gateway.port, before + begun)
        head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"headers of the request did not come" in body
    eventually(lambda: not held(gateway), "the gateway has closed its ends")


def test_the_time_for_headers_is_not_that_of_the_answer(gateway, script, monkeypatch):
    # The rest of the headers comes within this time, on a busy machine too.
    monkeypatch.setattr(heads, "HEAD_SECONDS", 3.0)
    script.pieces = ["one ", None]
    body = b'{"prompt": "x"}'
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS) as caller:
        head = head_of(Content_Length=len(body))
        caller.sendall(head[:20])
        eventually(lambda: held(gateway), "the headers have begun")
        caller.sendall(head[20:] + body)
        # A timer of the headers would end this connection first, as it was set earlier.
        other = raw(gateway.port, head[:20])
        assert other.startswith(b"HTTP/1.1 408 ")
        script.release.set()
        assert caller.recv(12) == b"HTTP/1.1 200"


def test_a_connection_without_a_request_is_closed(start, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.2)
    gateway = start()
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS) as caller:
        assert read_all(caller) == b""


def test_a_mistake_in_the_middle_of_a_body_is_told(gateway):
    bad = b"nothing that is a size\r\n"
    for _ in range(TRIES):
        head = head_of(Transfer_Encoding="chunked")
        answer = raw(gateway.port, head, b"1\r\nx\r\n", bad, b"x" * BIG)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_request"
    assert gateway.complete().status == 200


def test_a_body_that_came_too_slowly_is_told(start):
    gateway = start(body_timeout_seconds=0.05)
    answer = raw(gateway.port, head_of(Content_Length=3 << 20), b"x" * (1 << 17))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_a_refused_body_that_has_come_already_keeps_its_connection(gateway):
    caller = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_SECONDS)
    caller.connect()
    body = b'{"prompt": 1}'
    caller.sock.sendall(head_of(Content_Length=len(body)) + body)
    answer = http.client.HTTPResponse(caller.sock)
    answer.begin()
    assert answer.status == 400
    assert not answer.will_close
    caller.close()


def sending(gateway, *, size=1 << 10):
    """Sends what nobody asked for until the other side is gone; returns how many bytes it was."""
    num_bytes = 0
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS) as caller:
        caller.sendall(head_of(Transfer_Encoding="chunked", path="/nowhere"))
        assert b" 404 " in read_all(caller)
        try:
            while True:
                caller.sendall(b"x" * size)
                num_bytes += size
        except OSError:
            return num_bytes


def test_a_caller_that_sends_for_ever_is_dropped_by_its_bytes(gateway, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_BYTES", 8 << 20)
    assert 7 << 20 <= sending(gateway, size=1 << 20) < 64 << 20


def test_a_caller_that_sends_for_ever_is_dropped_by_the_time(gateway, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)
    assert sending(gateway) < connection.LINGER_BYTES


def test_a_caller_that_sends_nothing_is_dropped_sooner(gateway, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_IDLE_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS) as caller:
        caller.sendall(head_of(Content_Length=BIG, path="/nowhere"))
        assert b" 404 " in read_all(caller)
        eventually(lambda: not held(gateway), "the gateway has closed its end")


def held(gateway):
    """The connections that a gateway holds: those of a closed socket have no inode any more."""
    return [row for row in connections_of(gateway) if row[9] != "0"]


def test_a_gateway_ends_beside_a_caller_that_goes_on_sending(gateway, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_LAST_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS) as caller:
        caller.sendall(head_of(Content_Length=BIG, path="/nowhere"))
        assert b" 404 " in read_all(caller)
        gateway.stop()
        gateway.join()
