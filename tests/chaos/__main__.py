"""Chaos: `python -m tests.chaos --schedules 20`, or one again with `--seed N`.

Exits with 1 for any violation, and for any negative control that was not caught.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.chaos.controls import run_controls
from tests.chaos.schedules import draw_plan, play
from tests.chaos.stage import Stuck

#: The figures that programs read, always there.
FIGURES = (
    *("kills", "pauses", "redis_kills", "lost_replies", "drains", "cancels", "duplicate_submits"),
    *("requests", "resumed_requests", "fenced_commits", "rewinds", "reader_rewinds", "tokens"),
)
MOST_SEED = 1_000_000


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    figures: Counter[str] = Counter(dict.fromkeys(("schedules", "violations", *FIGURES), 0))
    controls: dict[str, list[str]] = {}
    if options.seed is None and options.controls:
        controls = run_controls()
        for name, found in controls.items():
            print(
                f"control  {name}: {'caught: ' + found[0] if found else 'NOT CAUGHT'}", flush=True
            )
    for seed in _seeds(options):
        figures.update(_play(seed))
        if options.seconds and time.monotonic() - began > options.seconds:
            break
    figures["controls"] = len(controls)
    figures["controls_caught"] = sum(map(bool, controls.values()))
    for name, value in figures.items():
        print(f"  {name.replace('_', ' '):<24}{value:>10}")
    print(f"  {'seconds':<24}{time.monotonic() - began:>10.0f}")
    if path := os.environ.get("CHAOS_JSON"):
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
    failed = figures["violations"] or figures["controls_caught"] < figures["controls"]
    return int(bool(failed))


def _play(seed: int) -> Counter[str]:
    """Plays one schedule and prints a line, and every violation with how to see it again."""
    plan = draw_plan(seed)
    began = time.monotonic()
    kinds = " ".join(fault.kind for fault in plan.faults)
    try:
        outcome = play(plan)
        figures, violations = outcome.figures, outcome.violations
    except Stuck as error:
        figures, violations = Counter(), [str(error)]
    seconds = time.monotonic() - began
    print(f"seed {seed}  {seconds:5.1f} s  {figures['tokens']:>5} tokens  {kinds}", flush=True)
    for sentence in violations:
        print(f"VIOLATION {sentence}\n  again: python -m tests.chaos --seed {seed}", flush=True)
    return figures + Counter(schedules=1, violations=len(violations))


def _seeds(options: argparse.Namespace) -> list[int]:
    if options.seed is not None:
        return [options.seed]
    first = options.first if options.first is not None else random.randrange(MOST_SEED)
    return list(range(first, first + options.schedules))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20, help="how many to play")
    parser.add_argument("--seconds", type=float, default=0.0, help="start none after so long")
    parser.add_argument("--first", type=int, help="the first seed; drawn when unset")
    parser.add_argument("--seed", type=int, help="play this one alone, without controls")
    parser.add_argument(
        "--controls", action=argparse.BooleanOptionalAction, default=True, help="break laws first"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
