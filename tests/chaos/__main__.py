"""Chaos: `python -m tests.chaos --schedules 20`, or one play again with `--seed N`.

Exits with 1 for any violation, and for any negative control that was not caught. With CHAOS_JSON in
the environment the figures are written to the file of that name.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path

from benchmarks.common.arguments import natural
from quire.cli.console import not_negative
from quire.cli.usage import positive
from tests.chaos.company import CONTROL, INTACT, SCHEDULE, Company, Play, Report
from tests.chaos.controls import HYBRID_LIVE, LIVE, LIVE_OF, VLLM_LIVE
from tests.chaos.hybrid import HYBRID
from tests.chaos.orders import ORDER_PLANTS
from tests.chaos.plants import PLANTS
from tests.chaos.real import VLLM
from tests.chaos.schedules import is_real
from tests.chaos.sinks.controls import SINKS_LIVE
from tests.chaos.sinks.laws import SINK_PLANTS
from tests.chaos.sinks.schedules import has_batch

#: The figures that programs read, always there. `fenced_commits`, `lost_claims` and `rewinds` are
#: the workers' own metrics: what was said for a claim that was someone else's by then, such claims
#: however a worker learnt of it, and what met a log that had lost its tail.
FIGURES = (
    *("runs", "violations", "controls", "controls_caught", "schedules", "requests", "tokens"),
    *("kills", "client_kills", "pauses", "drains", "redis_kills", "redis_stalls", "lost_bytes"),
    *("lost_replies", "cancels", "duplicate_submits", "resumed_requests", "fenced_commits"),
    *("lost_claims", "rewinds", "reaps", "reader_rewinds", "departures", "resubmits"),
    *("preemptions", "real_schedules", "vllm_schedules", "vllm_workers", "vllm_kills"),
    "hybrid_schedules",
    *("batches", "batch_lines", "webhooks", "webhooks_again", "http_retries"),
    *("gateway_kills", "batcher_kills", "notifier_kills", "gateway_pauses", "batcher_pauses"),
    *("notifier_pauses", "turns", "ends_told"),
    *("tokens_lost", "tokens_repeated", "tokens_different"),
    *("lines_lost", "lines_repeated", "ends_lost", "ends_under_two_ids"),
)
#: Violations by what has happened to tokens, in the audit's words.
TOKEN_FIGURES = {
    "tokens_lost": ("are missing", "the log holds", "is no beginning of the log", "completed with"),
    "tokens_repeated": ("were written twice",),
    "tokens_different": ("is not that of the uninterrupted run",),
}
#: The same for the lines of batches and for ends.
SINK_FIGURES = {
    "lines_lost": ("has 0 results",),
    "lines_repeated": ("has 2 results", "a request that is no line's"),
    "ends_lost": ("was told 0 times", "was posted by no webhook"),
    "ends_under_two_ids": ("was posted under 2 ids",),
}
MOST_SEED = 1_000_000
#: The width of a terminal that progress must not overflow.
WIDTH = 100


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    plays = _plays(options)
    figures: Counter[str] = Counter(dict.fromkeys(FIGURES, 0))
    if options.controls and len(plays) > 2:
        _audit_the_audit(figures)
    failed = []
    with Company(options.jobs) as company:
        for report in company.perform(plays, seconds=options.seconds):
            _count(figures, report)
            failed += [report] if report.has_failed else []
            _progress(report, done=figures["runs"], total=len(plays))
    seeds = [int(play.name) for play in plays if play.kind == SCHEDULE]
    if seeds:
        figures["first_seed"] = min(seeds)
    figures["seconds"] = round(time.monotonic() - began)
    _print(figures, failed)
    if path := os.environ.get("CHAOS_JSON"):
        _write(Path(path), figures, failed)
    is_sound = not failed and figures["controls_caught"] == figures["controls"]
    return int(not is_sound)


def _plays(options: argparse.Namespace) -> list[Play]:
    engine = options.engine
    if options.seed is not None:
        return [Play(SCHEDULE, str(options.seed), engine)]
    if options.control is not None:
        return [Play(kind, options.control, engine) for kind in (CONTROL, INTACT)]
    first = options.first if options.first is not None else random.randrange(MOST_SEED)
    controls = [Play(CONTROL, name) for name in (*LIVE, *SINKS_LIVE)]
    controls = [replace(play, kind=kind) for play in controls for kind in (CONTROL, INTACT)]
    own = {engine, *([HYBRID] if options.hybrid else [])} & LIVE_OF.keys()
    controls += [
        Play(kind, name, engine)
        for engine in sorted(own)
        for name in LIVE_OF[engine]
        for kind in (CONTROL, INTACT)
    ]
    seeds = [*range(first, first + options.schedules)]
    for number, is_wanted in ((options.real, is_real), (options.batches, has_batch)):
        seeds += islice(filter(is_wanted, count(first + options.schedules)), number)
    schedules = [Play(SCHEDULE, str(seed), engine) for seed in seeds]
    first_hybrid = first + options.schedules
    schedules += [
        Play(SCHEDULE, str(seed), HYBRID)
        for seed in range(first_hybrid, first_hybrid + options.hybrid)
    ]
    return (controls if options.controls else []) + schedules


def _audit_the_audit(figures: Counter[str]) -> None:
    """The controls that need no process."""
    plants = (*PLANTS.values(), *ORDER_PLANTS.values(), *SINK_PLANTS.values())
    figures["controls"] += len(plants)
    figures["controls_caught"] += sum(plant.is_found for plant in plants)


def _count(figures: Counter[str], report: Report) -> None:
    figures["runs"] += 1
    if report.play.kind == CONTROL:
        # What was broken on purpose is no figure of the system.
        figures["controls"] += 1
        figures["controls_caught"] += not report.has_failed
        return
    figures.update(report.figures)
    figures["schedules"] += report.play.kind == SCHEDULE
    figures["real_schedules"] += report.play.is_real
    for engine in LIVE_OF:
        is_one = report.play.kind == SCHEDULE and report.play.engine == engine
        figures[f"{engine}_schedules"] += is_one
    figures["violations"] += len(report.sentences)
    for name, words in (TOKEN_FIGURES | SINK_FIGURES).items():
        figures[name] += sum(any(word in text for word in words) for text in report.sentences)


def _progress(report: Report, *, done: int, total: int) -> None:
    """One line that is written over by the next; only for somebody who looks on."""
    if not sys.stdout.isatty():
        return
    verdict = "FAILED" if report.has_failed else "sound"
    line = f"{done}/{total}  {report.play.kind} {report.play.name}: {verdict}, "
    print(f"\r{line + f'{report.seconds:.1f} s':<{WIDTH}}", end="", flush=True)


def _print(figures: Counter[str], failed: Sequence[Report]) -> None:
    if sys.stdout.isatty():
        print("\r" + " " * WIDTH, end="\r")
    for report in failed:
        for sentence in report.sentences:
            print(f"VIOLATION in {report.play.kind} {report.play.name}: {sentence}")
        print(f"  again: {report.play.replay}")
    for name, value in figures.items():
        print(f"  {name.replace('_', ' '):<24}{value:>10}")


def _write(path: Path, figures: Counter[str], failed: Sequence[Report]) -> None:
    again = [report.play.replay for report in failed]
    path.write_text(json.dumps({**figures, "again": again}, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--schedules", type=natural, default=20, help="how many to play")
    parser.add_argument(
        "--real", type=natural, default=0, help="how many to play with the embedded model besides"
    )
    parser.add_argument(
        "--batches", type=natural, default=0, help="how many to play with a batch besides"
    )
    parser.add_argument(
        "--hybrid", type=natural, default=0, help="how many to play with a hybrid model besides"
    )
    parser.add_argument("--jobs", type=positive, default=4, help="how many to play at once")
    parser.add_argument(
        "--seconds", type=not_negative, default=0.0, help="start none after so long"
    )
    parser.add_argument("--first", type=int, help="the first seed; drawn when unset")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument(
        "--engine",
        choices=["", *LIVE_OF],
        default="",
        help="vllm: of some workers or all; hybrid: a hybrid model; [a fake one]",
    )
    parser.add_argument(
        "--control",
        choices={**LIVE, **SINKS_LIVE, **VLLM_LIVE, **HYBRID_LIVE},
        help="play this one alone, broken and intact",
    )
    parser.add_argument(
        "--controls", action=argparse.BooleanOptionalAction, default=True, help="break laws, too"
    )
    options = parser.parse_args()
    known = LIVE_OF.get(options.engine, {**LIVE, **SINKS_LIVE})
    if options.control is not None and options.control not in known:
        parser.error(f"--control {options.control} needs another --engine")
    if options.engine == VLLM and find_spec(VLLM) is None:
        parser.error("--engine vllm needs the environment of `make env-vllm`")
    return options


if __name__ == "__main__":
    sys.exit(main())
