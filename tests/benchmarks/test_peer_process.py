"""A peer is a child process that answers, stands still while others run, and may die alone."""

from pathlib import Path

import pytest

from benchmarks.common.workloads import WorkItem, Workload
from benchmarks.peers.child import Request, drive
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.peers.register import Peer
from tests.benchmarks.echo_engine import CRASH

ECHO = Peer("echo", "echo", "tests.benchmarks.echo_engine", own_environment=False)


@pytest.fixture
def echo(tmp_path):
    process = PeerProcess(ECHO, model=tmp_path, dtype="bf16", log=tmp_path / "log")
    yield process
    process.close()


def workload(*items: WorkItem) -> Workload:
    return Workload("test", items)


def test_a_child_answers_with_the_tokens_of_each_request_and_when_they_came(echo):
    first, second = echo.run(workload(WorkItem((5, 6), 3), WorkItem((9,), 1)))
    assert (first.tokens, second.tokens) == ([7, 8, 9], [10])
    assert first.seconds == sorted(first.seconds) and len(second.seconds) == 1


def test_a_request_that_arrives_later_gets_no_token_before_it_arrives(echo):
    _, late = echo.run(workload(WorkItem((1,), 1), WorkItem((2,), 2, arrival_seconds=0.05)))
    assert late.seconds[0] >= 0.05


def test_a_child_stands_still_between_its_runs(echo):
    state = Path(f"/proc/{echo.facts['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "T"
    assert echo.run(workload(WorkItem((1,), 1)))[0].tokens == [2]


def test_a_child_writes_its_logits_and_then_stands_still(echo, tmp_path):
    echo.write_logits([3, 4], tmp_path / "logits")
    assert (tmp_path / "logits").read_bytes() == b"\3\4"
    test_a_child_stands_still_between_its_runs(echo)


def test_a_child_that_dies_is_named_with_the_place_of_its_last_words(echo, tmp_path):
    with pytest.raises(PeerFailed, match=f"echo ended; its last words are in {tmp_path}"):
        echo.run(workload(WorkItem((CRASH,), 1)))


def test_tokens_of_one_step_become_readable_at_the_same_moment():
    steps = iter([[(0, [1, 2])], [(0, [3])]])
    left = [2]

    def step():
        left[0] -= 1
        return next(steps)

    (generation,) = drive(
        [Request([7], 3)], add=lambda *_: None, has_work=lambda: left[0] > 0, step=step
    )
    assert generation.tokens == [1, 2, 3]
    assert generation.seconds[0] == generation.seconds[1] < generation.seconds[2]
