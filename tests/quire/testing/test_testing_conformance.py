"""The fake is held to every test of the client: what holds for the one must hold for the other."""

import pytest

from quire.testing.in_memory import FakeQuire
from tests.quire.client import test_client

_SUITE = {name: test for name, test in vars(test_client).items() if name.startswith("test_")}
#: This one needs a server that can be reached by its url.
_LEFT_OUT = {"test_a_client_made_from_a_url_closes_what_it_opened"}

globals().update({name: test for name, test in _SUITE.items() if name not in _LEFT_OUT})


@pytest.fixture
def fake():
    with FakeQuire() as fake:
        yield fake


@pytest.fixture
def client(fake, monkeypatch):
    # How often an idle reader looks whether the request is still there.
    monkeypatch.setattr("quire.client.handle.MAX_BLOCK_SECONDS", 0.1)
    return fake.client()


@pytest.fixture
def broker(fake):
    return fake.broker


@pytest.fixture
def connection(fake):
    return fake.connection


@pytest.fixture
def make_broker(fake):
    return fake.make_broker


def test_all_of_the_suite_is_borrowed_but_what_is_left_out():
    assert _SUITE.keys() - globals().keys() == _LEFT_OUT
    assert all(globals()[name] is _SUITE[name] for name in _SUITE.keys() - _LEFT_OUT)
