"""A console keeps no connection on which no request comes: it has room for few."""

import socket

import pytest

from service.console import forms
from service.shared.http import heads
from tests.service.builders import PATIENCE_SECONDS


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(start, monkeypatch, sent):
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    console = start()
    with socket.create_connection(("127.0.0.1", console.port), PATIENCE_SECONDS) as browser:
        browser.sendall(sent)
        assert browser.recv(1) == b""


FORM = (
    b"POST /queues/default/actions/pause HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 50\r\n\r\na=b"
)


def test_a_form_that_is_cut_off_is_no_defect(start, caplog):
    console = start(role="operator")
    with socket.create_connection(("127.0.0.1", console.port), PATIENCE_SECONDS) as browser:
        browser.sendall(FORM)
        browser.shutdown(socket.SHUT_WR)
        assert browser.recv(1) == b""
    assert console.get("/livez").status == 200
    assert "defect" not in caplog.text


def test_a_form_that_does_not_come_to_its_end_is_not_waited_for(start, monkeypatch):
    monkeypatch.setattr(forms, "FORM_SECONDS", 0.1)
    console = start(role="operator")
    with socket.create_connection(("127.0.0.1", console.port), PATIENCE_SECONDS) as browser:
        browser.sendall(FORM)
        with browser.makefile("rb") as answer:
            text = answer.read()
    assert text.startswith(b"HTTP/1.1 408 ")
