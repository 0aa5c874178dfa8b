"""Computes the cells of one case from its runs: first the gate, then medians and ratios.

A cell has the results of one workload in one case: figures by engine, our ratio to each peer, our
share of the floor, whether the gate was passed, and the machine and versions.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.cases import Case
from benchmarks.common.floor import Limits, work_of
from benchmarks.common.gate import NOTHING_READ, Agreement, Reference, right_lengths
from benchmarks.common.workloads import make_workload
from benchmarks.peers.register import OURS, OURS_DEQUANTIZED, PEERS

METRICS = ("output_tokens_per_second", "inter_token_ms", "first_token_ms")
#: One round of one workload: (window, number). Ratios are computed within a round.
Round = tuple[int, int]
#: The first run of an engine with a workload in a window: (window, workload, engine).
FirstRun = tuple[int, str, str]
Cell = dict[str, Any]


@dataclass(slots=True)
class Runs:
    """The lines of a file of runs, separated by kind."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    limits: dict[int, Limits] = field(default_factory=dict)
    sustained: dict[int, list[Limits]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    commits: set[str] = field(default_factory=set)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Runs":
        found = cls()
        for record in map(json.loads, path.read_text().splitlines()):
            if "facts" in record:
                found.facts[record["engine"]] = record["facts"]
            elif "limits" in record:
                found._add_limits(record["window"], Limits(**record["limits"]))
                kept_up = found.sustained.setdefault(record["window"], [])
                kept_up.append(Limits(**record["sustained"]))
                found.machine = record["machine"]
                found.commits.add(record["commit"])
            else:
                found.runs.append(record)
        return found

    def _add_limits(self, window: int, limits: Limits) -> None:
        self.limits[window] = limits.best_with(self.limits.get(window, limits))

    def workloads(self) -> list[str]:
        return sorted({run["workload"] for run in self.runs})

    def of(self, workload: str) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["workload"] == workload]


def judge(case: Case, path: Path) -> dict[str, Cell]:
    """Workload -> cell of a case. Prints each cell with a line per engine."""
    found = Runs.read(path)
    # Peers that have quantized the original weights by themselves are compared with these.
    own_weights = {name for name in found.facts if case.is_quantized and PEERS[name].quantizes}
    reader = _Agreements(case, path.with_suffix(".agreement.json"))
    agreements = reader.read(found, found.facts.keys() - own_weights)
    original = reader.read_original(found, {OURS, *own_weights}) if own_weights else {}
    cells = {}
    for workload in found.workloads():
        runs = found.of(workload)
        items = make_workload(workload, vocab_size=case.vocab_size)
        wrong = sorted({run["engine"] for run in runs if not right_lengths(items, run["tokens"])})
        exact = total(agreements, OURS, workload=workload)
        correct = not wrong and (
            near_enough(agreements) and (not original or near_enough(original))
            if case.dtype == "bf16"
            else exact.num_agreed == exact.num_tokens > 0
        )
        rounds = by_round(run for run in runs if run["engine"] not in wrong)
        cell = {
            **medians(rounds),
            "ratio": ratios(rounds),
            "inter_token_ratio": ratios(rounds, "inter_token_ms"),
            "first_token_ratio": ratios(rounds, "first_token_ms"),
            "floor_share": floor_share(rounds, found.limits, workload, case),
            "sustained_floor_share": floor_share(
                rounds,
                {window: Limits.mean_of(each) for window, each in found.sustained.items()},
                workload,
                case,
            ),
            "agreement": shares(agreements),
            "agreement_with_original": shares(original),
            "correct": correct,
            "wrong_lengths": wrong,
            "rounds": {name: sum(name in each for each in rounds.values()) for name in found.facts},
            "engines": found.facts,
            "machine": found.machine,
            "commit": ", ".join(sorted(found.commits)),
        }
        cells[workload] = cell
        _print(case.name, workload, cell)
    return cells


def near_enough(agreements: Mapping[FirstRun, Agreement]) -> bool:
    """Whether we agree with the reference at least as often as each peer, on common prompts.

    Our own form with dequantized weights is no peer: it rounds less than integers do.
    """
    for peer in {name for _, _, name in agreements} - {OURS, OURS_DEQUANTIZED}:
        ours = theirs = NOTHING_READ
        for (window, workload, name), agreement in agreements.items():
            beside = agreements.get((window, workload, OURS), NOTHING_READ)
            if name == peer and beside.num_tokens:
                ours, theirs = ours + beside, theirs + agreement
        if ours.num_agreed * theirs.num_tokens < theirs.num_agreed * ours.num_tokens:
            return False
    return total(agreements, OURS).num_tokens > 0


def shares(agreements: Mapping[FirstRun, Agreement]) -> dict[str, float]:
    """Engine -> its share of tokens that agree, over all workloads."""
    names = sorted({name for _, _, name in agreements})
    read = {name: total(agreements, name) for name in names}
    return {name: round(one.share, 4) for name, one in read.items() if one.num_tokens}


def total(
    agreements: Mapping[FirstRun, Agreement], engine: str, *, workload: str | None = None
) -> Agreement:
    """The sum of an engine's agreements, over all workloads or one."""
    found = NOTHING_READ
    for (_, name, whose), agreement in agreements.items():
        if whose == engine and workload in (None, name):
            found += agreement
    return found


def by_round(runs: Iterable[Mapping[str, Any]]) -> dict[Round, dict[str, dict[str, float]]]:
    """Round -> engine -> figures. Several runs of one turn are combined into their median."""
    turns: dict[Round, dict[str, list[Mapping[str, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        turns[run["window"], run["round"]][run["engine"]].append(run["figures"])
    return {
        number: {
            name: {metric: statistics.median(run[metric] for run in turn) for metric in METRICS}
            for name, turn in engines.items()
        }
        for number, engines in turns.items()
    }


def medians(rounds: Mapping[Round, Mapping[str, Mapping[str, float]]]) -> Cell:
    """Metric -> engine -> the median over the rounds."""
    names = sorted({name for engines in rounds.values() for name in engines})
    return {
        metric: {
            name: _significant(
                statistics.median(
                    engines[name][metric] for engines in rounds.values() if name in engines
                )
            )
            for name in names
        }
        for metric in METRICS
    }


def ratios(
    rounds: Mapping[Round, Mapping[str, Mapping[str, float]]],
    metric: str = "output_tokens_per_second",
) -> dict[str, float]:
    """Peer -> our figure divided by the peer's: the median over the rounds with both."""
    found: dict[str, list[float]] = defaultdict(list)
    for engines in rounds.values():
        for name in engines:
            if name != OURS and OURS in engines:
                found[name].append(engines[OURS][metric] / engines[name][metric])
    return {name: _significant(statistics.median(each)) for name, each in sorted(found.items())}


def floor_share(
    rounds: Mapping[Round, Mapping[str, Mapping[str, float]]],
    limits: Mapping[int, Limits],
    workload: str,
    case: Case,
) -> float | None:
    """Our throughput as a share of the floor in the same window: the median over the rounds.

    None if there are no rounds, or the floor of the model is not known.
    """
    if case.shape is None:
        return None
    items = make_workload(workload, vocab_size=case.vocab_size)
    work = work_of(items, case.shape, dtype=case.dtype, bytes_per_weight=case.bytes_per_weight())
    shares = [
        engines[OURS]["output_tokens_per_second"]
        * work.seconds(limits[window])
        / items.num_output_tokens
        for (window, _), engines in rounds.items()
        if OURS in engines and window in limits
    ]
    return _significant(statistics.median(shares)) if shares else None


class _Agreements:
    """The agreement of each engine's first run of each workload in a window, cached in a file.

    The reference has the weights that the case has, which may be dequantized, or the original ones.
    """

    def __init__(self, case: Case, path: Path) -> None:
        self._vocab_size = case.vocab_size
        self._path = path
        self._references = {
            "": Reference(case.model, case.gguf_file if case.is_quantized else None),
            "original/": Reference(case.model),
        }
        self._known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}

    def read(self, found: Runs, engines: Collection[str]) -> dict[FirstRun, Agreement]:
        return self._read(found, engines, "")

    def read_original(self, found: Runs, engines: Collection[str]) -> dict[FirstRun, Agreement]:
        return self._read(found, engines, "original/")

    def _read(self, found: Runs, engines: Collection[str], kind: str) -> dict[FirstRun, Agreement]:
        agreements: dict[FirstRun, Agreement] = {}
        for run in found.runs:
            first_run = run["window"], run["workload"], run["engine"]
            if run["engine"] in engines and first_run not in agreements:
                agreements[first_run] = self._of(run, kind)
        return agreements

    def _of(self, run: Mapping[str, Any], kind: str) -> Agreement:
        key = f"{kind}{run['engine']}/{run['workload']}/{run['window']}/{run['turn']}"
        if key not in self._known:
            items = make_workload(run["workload"], vocab_size=self._vocab_size, turn=run["turn"])
            if not right_lengths(items, run["tokens"]):
                return NOTHING_READ
            agreement = self._references[kind].agreement(items, run["tokens"])
            self._known[key] = [agreement.num_agreed, agreement.num_tokens]
            self._path.write_text(json.dumps(self._known))
        return Agreement(*self._known[key])


def _print(case: str, workload: str, cell: Cell) -> None:
    share, kept_up = cell["floor_share"], cell["sustained_floor_share"]
    print(f"\n{case} {workload}, correct: {cell['correct']}, share of the floor: {share}", end="")
    print(f", at what the machine kept up: {kept_up}")
    titles = ["tok/s", "inter ms", "first ms", "ours / it", "agreement", "original"]
    print(f"{'':24}{''.join(f'{title:>10}' for title in titles)}")
    for name, rate in cell["output_tokens_per_second"].items():
        print(
            f"{name:24}{rate:>10}{cell['inter_token_ms'][name]:>10}"
            f"{cell['first_token_ms'][name]:>10}{cell['ratio'].get(name, ''):>10}"
            f"{cell['agreement'].get(name, ''):>10}"
            f"{cell['agreement_with_original'].get(name, ''):>10}"
        )


def _significant(value: float) -> float:
    """Rounds to four significant digits, which is more than the noise justifies."""
    return float(f"{value:.4g}")
