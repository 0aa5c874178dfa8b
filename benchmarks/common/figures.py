"""Computes the figures that benchmarks print from the times at which tokens arrived."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one workload. Latencies are medians and 99th percentiles over all requests."""

    output_tokens_per_second: float
    first_token_ms: float
    first_token_p99_ms: float
    inter_token_ms: float
    inter_token_p99_ms: float

    @classmethod
    def header(cls) -> str:
        return f"{'':24} {'tok/s':>9} {'first ms':>9} {'p99':>8} {'inter ms':>9} {'p99':>8}"

    def line(self, title: str) -> str:
        return (
            f"{title:24} {self.output_tokens_per_second:>9.1f} {self.first_token_ms:>9.1f}"
            f" {self.first_token_p99_ms:>8.1f} {self.inter_token_ms:>9.2f}"
            f" {self.inter_token_p99_ms:>8.2f}"
        )


def figures_of(
    arrivals: Mapping[str, Sequence[tuple[float, int]]],
    submitted: Mapping[str, float] | None = None,
) -> Figures:
    """Figures from (seconds since the start, tokens in this piece) per request.

    A piece of n tokens counts as n equal gaps since the previous piece. The time to the first token
    counts from the submit of its request, by default from the start.
    """
    begins = submitted or {}
    ends = [pieces[-1][0] for pieces in arrivals.values()]
    num_tokens = sum(count for pieces in arrivals.values() for _, count in pieces)
    first = [pieces[0][0] - begins.get(name, 0.0) for name, pieces in arrivals.items()]
    gaps: list[float] = []
    for pieces in arrivals.values():
        for (before, _), (now, count) in pairwise(pieces):
            gaps += [(now - before) / count] * count
    return Figures(
        output_tokens_per_second=num_tokens / max(ends),
        first_token_ms=1e3 * statistics.median(first),
        first_token_p99_ms=1e3 * percentile(first, 0.99),
        inter_token_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
        inter_token_p99_ms=1e3 * percentile(gaps, 0.99) if gaps else 0.0,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def median_run(runs: Sequence[Figures]) -> Figures:
    """The run with the median throughput."""
    return sorted(runs, key=lambda run: run.output_tokens_per_second)[len(runs) // 2]


def machine() -> dict[str, str | int]:
    """The machine and the versions with which the figures were measured."""
    import torch

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor() -> str:
    """The processor's name, family and model from Linux; on other systems from Python."""
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return platform.processor() or "unknown"
    lines = [line.partition(":") for line in information.read_text().splitlines() if ":" in line]
    facts = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    name = facts.get("model name", "unknown")
    return f"{name}, family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}"


def commit() -> str:
    """The measured commit, with `-dirty` if the tree differs from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    finished = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return finished.stdout.strip() or "unknown"


def process_seconds(pid: int) -> float:
    """User and system time of a process, from /proc."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
