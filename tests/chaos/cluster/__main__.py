"""Chaos on a cluster: `python -m tests.chaos.cluster --schedules 50`, or one again with `--seed N`.

Exits with 1 for any violation, and for any control that was not caught, or not sound when intact.
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from benchmarks.common.arguments import natural
from quire.cli.usage import positive
from tests.chaos.cluster.performing import Report, perform
from tests.chaos.cluster.schedules import CONTROLS

MOST_SEED = 1_000_000
#: The figures that are always printed.
FIGURES = (
    *("schedules", "violations", "controls", "controls_caught", "requests", "tokens"),
    *("fault_kill_master", "fault_lose_tail", "fault_move", "fault_switch", "fault_kill"),
    *("fault_pause", "tail_tokens", "rewinds", "reader_rewinds", "resubmits", "fenced_commits"),
    *("lost_claims", "resumed_requests", "preemptions", "ended_completed"),
)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    figures: Counter[str] = Counter(dict.fromkeys(FIGURES, 0))
    is_sound = True
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    with pool as plays:
        for done in as_completed(plays.submit(perform, *one) for one in _plays(options)):
            is_sound &= _count(figures, done.result())
    figures["seconds"] = round(time.monotonic() - began)
    for name, value in figures.items():
        print(f"  {name.replace('_', ' '):<24}{value:>10}")
    return int(not is_sound)


def _plays(options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.seed is not None:
        return [("schedule", str(options.seed))]
    first = options.first if options.first is not None else random.randrange(MOST_SEED)
    print(f"seeds {first} to {first + options.schedules - 1}", flush=True)
    controls = [(kind, name) for name in CONTROLS for kind in ("control", "intact")]
    seeds = range(first, first + options.schedules)
    return (controls if options.controls else []) + [("schedule", str(seed)) for seed in seeds]


def _count(figures: Counter[str], report: Report) -> bool:
    """Adds a report to the figures; returns whether it is as it has to be."""
    if report.kind == "control":
        figures["controls"] += 1
        figures["controls_caught"] += bool(report.sentences)
        if not report.sentences:
            print(f"NOT CAUGHT: {report.name}", flush=True)
        return bool(report.sentences)
    figures.update(report.figures)
    figures["schedules"] += report.kind == "schedule"
    figures["violations"] += len(report.sentences)
    for sentence in report.sentences:
        print(f"VIOLATION in {report.kind} {report.name}: {sentence}", flush=True)
    if report.sentences and report.kind == "schedule":
        print(f"  again: python -m tests.chaos.cluster --seed {report.name}", flush=True)
    return not report.sentences


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cluster", description=__doc__)
    parser.add_argument("--schedules", type=natural, default=10, help="how many to play")
    parser.add_argument("--jobs", type=positive, default=3, help="how many to play at once")
    parser.add_argument("--first", type=int, help="the first seed; drawn when unset")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument(
        "--controls", action=argparse.BooleanOptionalAction, default=True, help="break laws, too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
