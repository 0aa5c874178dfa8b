"""Lanes: a node that does not answer delays no other."""

import threading
from collections.abc import Sequence

import pytest

from service.worker.outgoing.lanes import Lanes
from tests.service.builders import PATIENCE_SECONDS


def test_a_node_that_hangs_delays_no_other():
    hangs, done = threading.Event(), threading.Event()

    def do(work: Sequence[str]) -> None:
        if "slow" in work:
            hangs.wait(PATIENCE_SECONDS)
        else:
            done.set()

    lanes = Lanes[str](do)
    lanes.hand("a:1", ["slow"])
    lanes.hand("b:1", ["fast"])
    assert done.wait(PATIENCE_SECONDS)
    assert not lanes.is_idle
    hangs.set()
    lanes.wait(PATIENCE_SECONDS)
    assert lanes.is_idle


def test_what_comes_for_a_busy_node_is_done_together_and_in_order():
    began, go_on = threading.Event(), threading.Event()
    found: list[list[int]] = []

    def do(work: Sequence[int]) -> None:
        found.append(list(work))
        began.set()
        go_on.wait(PATIENCE_SECONDS)

    lanes = Lanes[int](do)
    lanes.hand("a:1", [1])
    assert began.wait(PATIENCE_SECONDS)
    lanes.hand("a:1", [2, 3])
    lanes.hand("a:1", [4])
    go_on.set()
    lanes.close(seconds=PATIENCE_SECONDS)
    assert found == [[1], [2, 3, 4]]
    assert lanes.is_idle


def test_an_error_ends_the_publisher_too():
    def do(work: Sequence[int]) -> None:
        raise KeyError(work[0])

    lanes = Lanes[int](do)
    lanes.hand("a:1", [7])
    with pytest.raises(KeyError, match="7"):
        lanes.wait(PATIENCE_SECONDS)
    with pytest.raises(KeyError, match="7"):
        lanes.hand("b:1", [8])
