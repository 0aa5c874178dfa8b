"""What the benchmark of busy neighbours makes of its runs, and that it can fail."""

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import bench_neighbours
from benchmarks.bench_neighbours import OUR_SIDES, Sides, busy_processes, figure_of, summarize
from benchmarks.peers.child import Generation


def generation(*seconds: float) -> Generation:
    return Generation(tokens=list(range(len(seconds))), seconds=list(seconds))


def test_figures_are_the_mean_time_between_tokens_and_tokens_per_second():
    assert figure_of("W2", [generation(1.0, 1.1, 1.4)]) == pytest.approx(200)
    assert figure_of("W1", [generation(1.0, 2.0), generation(4.0)]) == pytest.approx(0.75)


def test_each_round_is_compared_with_the_better_fixed_number_of_that_round():
    rounds = {
        "W2": {"quire": [10, 12, 30], "one-thread": [10, 20, 20], "all-threads": [20, 10, 40]},
        "W1": {"quire": [90, 90, 90], "one-thread": [100, 50, 50], "all-threads": [50, 100, 45]},
    }
    assert summarize(rounds) == {
        "w2_ms": 12, "w1": 90, "w2_of_best": 1.2, "w1_of_best": 0.9,
        "one-thread": {"w2_ms": 20, "w1": 50}, "all-threads": {"w2_ms": 20, "w1": 50},
    }  # fmt: skip


def test_neighbours_run_while_the_block_does():
    with busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)


class Engine:
    """A side with two tokens per request, which differ where `wrong`."""

    def __init__(self, peer, *, wrong: str, **_: object) -> None:
        self._tokens = [1, 2 if peer.name == wrong else 3]

    def run(self, workload) -> list[Generation]:
        return [Generation(tokens=list(self._tokens), seconds=[1.0, 2.0]) for _ in workload.items]

    def close(self) -> None: ...


@pytest.mark.parametrize("wrong", ["", "one-thread", "all-threads"])
def test_tokens_that_depend_on_the_threads_end_the_benchmark(wrong, monkeypatch):
    monkeypatch.setattr(
        bench_neighbours, "PeerProcess", lambda peer, **options: Engine(peer, wrong=wrong)
    )
    monkeypatch.setattr(bench_neighbours, "model_folder", Path)
    sides = Sides("SMALL-bf16", [])
    rounds = {"W2": defaultdict(list), "W1": defaultdict(list)}
    if wrong:
        with pytest.raises(SystemExit, match="number of threads"):
            sides.round(rounds, number=0)
    else:
        sides.round(rounds, number=1)
        assert rounds["W2"] == {side.name: [1000.0] for side in OUR_SIDES}
