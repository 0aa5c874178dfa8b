"""How every HTTP door reads a request whose end, or whose target, can be read in two ways.

A proxy in front may read the end of such a request elsewhere. What follows must not run as a second
call: request smuggling.
"""

import json
import socket

import pytest
from prometheus_client import CollectorRegistry

from quire.testing.in_memory import FakeQuire
from service.shared.probes import ProbeServer
from tests.service.builders import PATIENCE_SECONDS
from tests.service.console.builders import ConsoleThread
from tests.service.gateway.builders import GatewayThread
from tests.service.gateway.http.test_early_answers import raw, read_all

CHUNKED = "Transfer-Encoding: chunked"
HIDDEN = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def fake():
    with FakeQuire() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(fake, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with GatewayThread(fake.async_client, files_folder=folder) as gateway:
        yield gateway.port


@pytest.fixture(scope="module")
def console(fake):
    with ConsoleThread(fake.connection) as console:
        yield console.port


@pytest.fixture(scope="module")
def probes():
    """The server of workers, exporters, batchers and notifiers."""
    checks = {"/livez": lambda: (True, {})}
    server = ProbeServer(CollectorRegistry(), checks, host="127.0.0.1", port=0)
    server.start()
    yield server.port
    server.stop()


@pytest.fixture(params=["gateway", "console", "probes"])
def door(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["gateway", "console"])
def open_door(request):
    """A door that may answer several requests on one connection."""
    return request.getfixturevalue(request.param)


def asked(*headers, method="GET", target="/livez", body=b""):
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def statuses(answers):
    """The status of each response in these bytes."""
    heads = [part.partition(b"\r\n\r\n")[0] for part in answers.split(b"HTTP/1.")[1:]]
    return [int(head.split()[1]) for head in heads]


@pytest.mark.parametrize(
    "headers",
    [
        [f"Content-Length: {5 + len(HIDDEN)}", CHUNKED],
        [CHUNKED, "Content-Length: 5"],
        ["Content-Length: 0", CHUNKED],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: 5, 6"],
        ["Content-Length: +5"],
        ["Content-Length:"],
        ["Transfer-Encoding:", " chunked"],
        ["X-Folded: a", "\tContent-Length: 5"],
        ["Transfer-Encoding : chunked"],
        ["Transfer-Encoding: \x0bchunked"],
        ["Transfer-Encoding: chunked, gzip"],
        ["Transfer-Encoding: gzip, chunked"],
        ["Transfer-Encoding: identity", "Content-Length: 5"],
        [CHUNKED, CHUNKED],
    ],
)
def test_a_request_whose_end_is_unclear_is_refused_and_nothing_behind_it_runs(open_door, headers):
    (status,) = statuses(raw(open_door, asked(*headers, body=b"0\r\n\r\n" + HIDDEN)))
    # Codings that are not known have 501, as RFC 9112 says.
    assert status in (400, 501)


def test_no_door_answers_what_is_hidden_behind_two_lengths(door):
    headers = [f"Content-Length: {5 + len(HIDDEN)}", CHUNKED]
    assert len(statuses(raw(door, asked(*headers, body=b"0\r\n\r\n" + HIDDEN)))) == 1


def test_a_caller_of_the_gateway_is_told_what_is_unclear(gateway):
    answer = raw(gateway, asked("Content-Length: 5", CHUNKED, method="POST", body=b"0\r\n\r\n"))
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
    assert "Content-Length and Transfer-Encoding" in error["message"]


@pytest.mark.parametrize(
    "headers", [["Content-Length: 5"] * 2, ["Content-Length: 5, 5"], [CHUNKED]]
)
def test_a_request_with_one_end_is_answered_and_so_is_the_next(open_door, headers):
    # Also a length that is given twice, which RFC 9110 lets a server read as one.
    body = b"0\r\n\r\n" + asked("Connection: close")
    assert statuses(raw(open_door, asked(*headers, body=body))) == [200, 200]


@pytest.mark.parametrize(
    "target", ["http://x:1/livez", "HTTPS://localhost/livez?a=b", "http://[::1]:80/livez"]
)
def test_a_target_may_be_an_address_as_a_proxy_gets_it(door, target):
    answer = raw(door, asked("Connection: close", target=target))
    assert statuses(answer) == [200]
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"ok": True}


@pytest.mark.parametrize(("target", "path"), [("http://localhost", "/"), ("http://[::1]?a=b", "/")])
def test_an_address_without_a_path_is_that_of_the_root(door, target, path):
    expected = statuses(raw(door, asked("Connection: close", target=path)))
    assert statuses(raw(door, asked("Connection: close", target=target))) == expected


@pytest.mark.parametrize("target", ["http://[x/livez", "http:///livez", "http://a@x/livez", "*"])
def test_what_is_no_address_is_no_path_either(open_door, target):
    assert statuses(raw(open_door, asked("Connection: close", target=target))) == [404]


def test_a_probe_for_what_is_no_address_is_answered(probes):
    assert statuses(raw(probes, asked(target="http://[x/livez"))) == [404]


def test_the_host_of_an_address_counts_and_not_that_of_the_header(console):
    answer = raw(console, asked("Connection: close", target="http://elsewhere.example/"))
    assert statuses(answer) == [421]
    answer = raw(console, asked("Connection: close", target="/"))
    assert statuses(answer) != [421]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank"),
        *("/v1/classify", "/v1/responses", "/v1/files", "/v1/batches"),
    ],
)
@pytest.mark.parametrize("encoding", ["gzip", "identity, br", "deflate\r\nContent-Encoding: zstd"])
def test_a_compressed_body_is_refused_by_its_header(gateway, path, encoding):
    head = [f"Content-Encoding: {encoding}", "Content-Length: 2", "Content-Type: application/json"]
    answer = raw(gateway, asked(*head, "Connection: close", method="POST", target=path, body=b"{}"))
    assert statuses(answer) == [415]
    assert b"\r\naccept-encoding: identity\r\n" in answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["param"]) == ("unsupported_encoding", "Content-Encoding")


def test_a_body_that_says_that_it_is_not_compressed_is_read(gateway):
    head = ["Content-Encoding: identity", "Content-Length: 2", "Connection: close"]
    path = "/v1/completions"
    answer = raw(gateway, asked(*head, method="POST", target=path, body=b"{}"))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score"),
        *("/v1/responses", "/v1/batches"),
    ],
)
@pytest.mark.parametrize("headers", [["Content-Length: 99"], [CHUNKED]])
def test_a_body_that_is_cut_off_is_not_looked_at(gateway, path, headers):
    body = b'{"prompt": "x", "input": "x"}'
    if headers == [CHUNKED]:
        # The last chunk, of size 0, never comes.
        body = b"%x\r\n%b\r\n" % (len(body), body)
    with socket.create_connection(("127.0.0.1", gateway), PATIENCE_SECONDS) as caller:
        caller.sendall(asked(*headers, method="POST", target=path, body=body))
        caller.shutdown(socket.SHUT_WR)
        assert read_all(caller) == b""


def test_a_compressed_form_of_the_console_is_refused(fake):
    with ConsoleThread(fake.connection, role="operator") as console:
        reply = console.ask(
            "POST",
            "/queues/default/actions/pause",
            b"a=b",
            Content_Type="application/x-www-form-urlencoded",
            Content_Encoding="gzip",
        )
    assert reply.status == 415
    assert "Content-Encoding" in reply.text
