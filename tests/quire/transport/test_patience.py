"""How long a reader waits before it looks again."""

import pytest

from quire.errors import WaitTimeout
from quire.transport.patience import AT_ONCE, Patience


def test_who_loses_its_turn_when_it_has_to_look_looks_at_once(monkeypatch):
    now = 100.0
    monkeypatch.setattr("quire.transport.patience.time.monotonic", lambda: now)
    patience = Patience(None, "r")
    patience.look_in(0.5)
    assert patience.left(2.0) == 0.5
    now += 1.0
    assert 0 < patience.left(2.0) < 0.1
    patience.look_in(None)
    assert patience.left(2.0) == 2.0


@pytest.mark.parametrize("reason", ["nobody works", None])
def test_time_that_is_up_right_after_a_look_leaves_one_more_to_find_out_why(monkeypatch, reason):
    now = 100.0
    monkeypatch.setattr("quire.transport.patience.time.monotonic", lambda: now)
    patience = Patience(0.3, "r")
    now += 0.29
    assert not patience.is_to_explain
    now += 0.02
    assert patience.left(2.0) == AT_ONCE
    assert patience.is_to_explain
    if reason:
        patience.explain(reason)
    # Without a look, a second read is not granted.
    with pytest.raises(WaitTimeout, match=f"r has not ended yet{f': {reason}' if reason else '$'}"):
        patience.left(2.0)
