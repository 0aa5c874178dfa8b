"""A process that computes for the worker of another machine: when it is one, and how it ends."""

import socket

import pytest

from engine.errors import DeviceFailed, ModelRefused
from engine.vllm import follower
from service.worker.model.node import serves_no_requests
from service.worker.process.follower import run_follower
from service.worker.settings.config import Settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"node_rank": 0}, False),
        ({"node_rank": "0"}, False),
        ({"node_rank": "2"}, True),
    ],
)
def test_only_the_first_machine_serves_requests(given, expected):
    assert serves_no_requests(Settings(engine="vllm", vllm=given)) is expected


@pytest.mark.parametrize(
    ("error", "code"), [(ModelRefused("no such model"), 2), (DeviceFailed("node 0 is gone"), 1)]
)
def test_the_exit_code_says_whether_a_start_can_help(monkeypatch, caplog, error, code):
    def follow(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(follower, "follow", follow)
    assert run_follower(Settings(engine="vllm", vllm={"node_rank": 1})) == code
    assert str(error) in caplog.text


def test_the_first_machine_is_there_while_it_listens():
    with socket.create_server(("127.0.0.1", 0)) as first:
        address = first.getsockname()
        assert follower._answers(address)
    assert not follower._answers(address)
