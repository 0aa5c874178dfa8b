"""A console keeps no connection on which no request comes: it has room for few."""

import socket

import pytest

from service.gateway.http import heads
from tests.service.builders import PATIENCE_SECONDS


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(start, monkeypatch, sent):
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    console = start()
    with socket.create_connection(("127.0.0.1", console.port), PATIENCE_SECONDS) as browser:
        browser.sendall(sent)
        assert browser.recv(1) == b""
