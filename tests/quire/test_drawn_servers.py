"""Each test of a queue runs on the real server, and on one of the two others."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.quire import conftest
from tests.quire.conftest import ALL_SERVERS_VARIABLE, pytest_collection_modifyitems

ALL = ("fake", "real", "old")
NUM_CASES = 100


class Item(SimpleNamespace):
    """As much of a collected test as the draw looks at."""

    __hash__ = object.__hash__


def item(server, case):
    return Item(
        nodeid=f"tests/test_a.py::test_b[{server}-{case}]",
        callspec=SimpleNamespace(params={"connection": server, "case": case}),
    )


def drawn(servers):
    """The servers on which each case runs, where a run collects the cases of these servers."""
    items = [item(server, f"case-{n}") for server in servers for n in range(NUM_CASES)]
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    pytest_collection_modifyitems(config, items)
    cases = [
        [one.callspec.params["connection"] for one in items if one.nodeid.endswith(f"-{n}]")]
        for n in range(NUM_CASES)
    ]
    return Counter(map(tuple, cases))


@pytest.fixture(autouse=True)
def _drawn(monkeypatch):
    monkeypatch.delenv(ALL_SERVERS_VARIABLE, raising=False)
    monkeypatch.setattr(conftest, "server_program", lambda: ("redis-server", "/redis"))
    monkeypatch.setattr(conftest, "packaged_server", lambda _: "/old")
    monkeypatch.delenv(conftest.URL_VARIABLE, raising=False)


def test_each_runs_on_the_real_server_and_on_one_other_and_both_others_are_used():
    found = drawn(ALL)
    assert found.keys() == {("fake", "real"), ("real", "old")}
    assert min(found.values()) > NUM_CASES / 4


def test_who_asks_for_one_server_gets_all_its_tests():
    assert drawn(["old"]) == {("old",): NUM_CASES}


def test_where_a_mark_or_the_machine_leaves_less_than_three_all_of_them_run(monkeypatch):
    assert drawn(["fake"]) == {("fake",): NUM_CASES}
    assert drawn(["fake", "real"]) == {("fake", "real"): NUM_CASES}
    monkeypatch.setattr(conftest, "packaged_server", lambda _: None)
    assert drawn(ALL) == {ALL: NUM_CASES}
    monkeypatch.setattr(conftest, "server_program", lambda: None)
    assert drawn(ALL) == {ALL: NUM_CASES}


def test_a_server_that_is_named_by_its_url_is_the_real_one(monkeypatch):
    monkeypatch.setattr(conftest, "server_program", lambda: None)
    monkeypatch.setenv(conftest.URL_VARIABLE, "redis://127.0.0.1:1/0")
    assert ALL not in drawn(ALL)


def test_marks_choose_before_the_draw(request):
    hook = request.config.hook.pytest_collection_modifyitems
    called = [one.function.__module__ for one in reversed(hook.get_hookimpls())]
    assert called.index("_pytest.mark") < called.index(conftest.__name__)


def test_all_servers_can_be_asked_for(monkeypatch):
    monkeypatch.setenv(ALL_SERVERS_VARIABLE, "1")
    assert drawn(ALL) == {ALL: NUM_CASES}
