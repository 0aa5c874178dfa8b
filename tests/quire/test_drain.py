"""The wish of an operator that a worker ends: told until heard, then forgotten."""

import pytest


def test_a_worker_is_told_to_drain_until_it_says_that_it_does(broker):
    assert broker.beat_worker("w", "ready", {}) is False
    broker.drain("w")
    broker.drain("w")
    assert broker.beat_worker("other", "ready", {}) is False
    assert [broker.beat_worker("w", "ready", {}) for _ in range(2)] == [True, True]
    assert broker.control().drain_wishes == {"w"}
    assert broker.beat_worker("w", "draining", {}) is False
    assert broker.control().drain_wishes == frozenset()
    assert broker.beat_worker("w", "ready", {}) is False, "a new life of that name is welcome"


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_worker_that_ends_for_another_reason_leaves_no_wish_behind(broker, state):
    broker.drain("w")
    broker.beat_worker("w", state, {})
    assert broker.control().drain_wishes == frozenset()


def test_a_wish_that_nobody_heard_for_a_day_is_not_for_who_comes_then(broker, connection):
    broker.drain("w")
    connection.hset(broker.keys.control, "drain:w", 1000)
    assert broker.beat_worker("w", "loading", {}) is False
    assert broker.control().drain_wishes == frozenset()


def test_the_wish_changes_neither_limits_nor_pause(broker):
    broker.pause("repairs")
    broker.drain("max_requests")
    assert broker.control().limits.requests is None
    assert broker.pause_reason() == "repairs"
