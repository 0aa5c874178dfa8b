"""How long a reader waits before it looks again."""

from quire.transport.patience import Patience


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
