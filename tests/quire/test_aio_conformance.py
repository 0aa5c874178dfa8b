"""The clients that share their reads are held to every test of the plain client."""

import inspect

import pytest

from quire import Client
from quire.reader import SharedReadsBroker
from tests.quire import test_client, test_groups, test_history
from tests.quire.loop_face import blocking_client

#: These make a Client of their own and say nothing about another one.
_OF_THE_PLAIN_CLIENT = {
    "test_a_full_queue_is_a_typed_error",
    "test_a_client_made_from_a_url_closes_what_it_opened",
}

_SUITES = (test_client, test_groups, test_history)
_BORROWED = {
    name: test
    for suite in _SUITES
    for name, test in vars(suite).items()
    if name.startswith("test_")
    and "client" in inspect.signature(test).parameters
    and name not in _OF_THE_PLAIN_CLIENT
}
globals().update(_BORROWED)


@pytest.fixture(params=["event loop", "threads"])
def client(request, connection, broker, monkeypatch):
    # How often an idle reader looks whether the request is still there.
    for module in ("async_handle", "async_groups", "handle", "groups"):
        monkeypatch.setattr(f"quire.{module}.MAX_BLOCK_SECONDS", 0.1)
    if request.param == "threads":
        yield Client(SharedReadsBroker(connection, queue=broker.keys.queue))
        return
    with blocking_client(connection, queue=broker.keys.queue) as faced:
        yield faced


@pytest.mark.parametrize("suite", _SUITES, ids=lambda suite: suite.__name__)
def test_each_suite_that_is_borrowed_gives_something(suite):
    assert len(_BORROWED.keys() & vars(suite).keys()) >= 8
