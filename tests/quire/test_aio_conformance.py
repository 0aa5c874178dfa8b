"""The clients that share their reads are held to every test of the plain client."""

import pytest

from quire import Client, Handle
from quire.aio import AsyncHandle
from quire.reader import SharedReadsBroker
from tests.quire import test_client
from tests.quire.loop_face import blocking_client

#: These make a Client of their own and say nothing about another one.
_OF_THE_PLAIN_CLIENT = {
    "test_a_full_queue_is_a_typed_error",
    "test_a_client_made_from_a_url_closes_what_it_opened",
}

_BORROWED = {
    name: test
    for name, test in vars(test_client).items()
    if name.startswith("test_") and name not in _OF_THE_PLAIN_CLIENT
}
globals().update(_BORROWED)


@pytest.fixture(params=["event loop", "threads"])
def client(request, connection, broker, monkeypatch):
    # How often an idle reader looks whether the request is still there.
    for module in (AsyncHandle.__module__, Handle.__module__):
        monkeypatch.setattr(f"{module}.MAX_BLOCK_SECONDS", 0.1)
    if request.param == "threads":
        yield Client(SharedReadsBroker(connection, queue=broker.keys.queue))
        return
    with blocking_client(connection, queue=broker.keys.queue) as faced:
        yield faced


def test_the_suite_that_is_borrowed_is_not_empty():
    assert len(_BORROWED) >= 15
