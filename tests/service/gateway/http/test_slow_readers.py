"""A caller that does not take what it is sent costs a bounded amount, and a bounded time."""

import json
import socket
from pathlib import Path

import pytest

from service.gateway.streaming import EventStream
from tests.service.builders import eventually
from tests.service.gateway.builders import wait_until_cancelled

#: Twelve bytes of JSON for each token; all pieces are more than the buffers of sockets hold.
PIECE = "\N{GRINNING FACE}" * 10_000
NUM_PIECES = 100


def connected(gateway):
    """A socket that takes little."""
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.connect(("127.0.0.1", gateway.port))
    return caller


def stream_without_reading(gateway, stream=True):
    """A call on such a socket, of which the caller reads nothing."""
    caller = connected(gateway)
    send_call(caller, stream)
    return caller


def send_call(caller, stream):
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    caller.sendall(head.encode() + body)


def test_what_a_caller_does_not_take_is_not_read_for_it(start, fake, script, monkeypatch):
    told: list[int] = []
    plain = EventStream._event

    def event(self, body):
        written = plain(self, body)
        told.append(len(written))
        return written

    monkeypatch.setattr(EventStream, "_event", event)
    script.pieces = [PIECE] * NUM_PIECES
    gateway = start(patience_seconds=3600)
    with stream_without_reading(gateway):
        eventually(lambda: fake.requests, "the request runs")
        (request,) = fake.requests
        eventually(lambda: fake.broker.status(request.id).state == "completed", "all is said")
        # Everything is in the log; the gateway has formed what the buffers hold, and no more.
        assert len(told) < NUM_PIECES / 2
        reply = gateway.get(f"/v1/requests/{request.id}")
        assert reply.body["usage"]["completion_tokens"] == NUM_PIECES * len(PIECE)
        assert len(told) < NUM_PIECES / 2


def test_a_caller_that_takes_nothing_for_long_counts_as_gone(start, fake, script):
    script.pieces = [*[PIECE] * 100, None]
    gateway = start(patience_seconds=0.05)
    with stream_without_reading(gateway):
        gateway.wait_for_hang_up("cancelled")
        (request,) = fake.requests
        wait_until_cancelled(fake, request.id)


def test_a_whole_answer_has_its_place_until_it_is_taken(start, fake, script):
    script.pieces = [PIECE] * NUM_PIECES
    gateway = start(max_open_answers=1, patience_seconds=3600)
    with stream_without_reading(gateway, stream=False) as caller:
        # It is told now, and the server must not hold it for a caller who counts no more.
        assert caller.recv(4) == b"HTTP"
        assert gateway.metric("quire_gateway_open_answers", kind="open") == 1
        assert gateway.complete().error["code"] == "gateway_full"
        answer = caller.makefile("rb").read
        head, body = b"", b""
        while not head.endswith(b"\r\n\r\n"):
            head += answer(1)
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        body = answer(length)
    assert json.loads(body)["choices"][0]["text"] == PIECE * NUM_PIECES
    eventually(lambda: not gateway.metric("quire_gateway_open_answers", kind="open"), "it is over")


def test_a_whole_answer_that_nobody_takes_gives_its_place_free(start, script):
    script.pieces = [PIECE] * NUM_PIECES
    gateway = start(max_open_answers=1, patience_seconds=0.05)
    with stream_without_reading(gateway, stream=False) as caller:
        assert caller.recv(4) == b"HTTP"
        open_answers = "quire_gateway_open_answers"
        eventually(lambda: not gateway.metric(open_answers, kind="open"), "it counts as gone")


def test_a_list_has_its_place_until_it_is_taken(start, fake, tmp_path):
    gateway = start(files_folder=tmp_path / "files", max_open_answers=1, patience_seconds=3600)
    keys = fake.broker.keys
    times = {"created_ms": 1, "expires_ms": 1 << 50}
    for number in range(NUM_PIECES):
        name = f"file-{number:032x}"
        fields = {"state": "published", "tenant": "default", "purpose": "batch", "bytes": 1}
        fake.connection.hset(keys.file(name), mapping=fields | times | {"filename": PIECE})
        fake.connection.zadd(keys.files("default"), {name: number})
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(("127.0.0.1", gateway.port))
        caller.sendall(b"GET /v1/files HTTP/1.1\r\nHost: x\r\n\r\n")
        assert caller.recv(4) == b"HTTP"
        assert gateway.metric("quire_gateway_open_answers", kind="open") == 1
        assert gateway.get("/v1/files").error["code"] == "gateway_full"
    eventually(lambda: not gateway.metric("quire_gateway_open_answers", kind="open"), "it is over")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this kernel has no such limit")
@pytest.mark.parametrize("stream", [False, True])
def test_the_connection_of_such_a_caller_is_broken_off(start, script, stream):
    script.pieces = [PIECE] * NUM_PIECES
    gateway = start(patience_seconds=0.5)
    with connected(gateway) as caller:
        eventually(lambda: connections_of(gateway), "the connection is there")
        send_call(caller, stream)
        # Were it only closed, the kernel would offer for ever what the caller does not take.
        eventually(lambda: not connections_of(gateway), "the connection is no more")


def connections_of(gateway):
    """The connections that the kernel keeps for a gateway, as rows of its table."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # The fourth column is the state, 0A that of a socket that listens.
    return [row for row in rows if row[1].endswith(f":{gateway.port:04X}") and row[3] != "0A"]
