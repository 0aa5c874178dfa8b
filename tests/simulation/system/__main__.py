"""Plays seeded schedules of the whole system on virtual time: `python -m tests.simulation.system`.

Real are: the Client and its handles, the Broker with redis-py's commands and parsing, every Lua
script in Lua 5.1, the Worker with all its threads (intake, engine loop, publisher, heartbeat,
keeper, drain), the Engine, the Scheduler, the KV cache and the texts. Simulated are: Redis' own
commands (held to a real server by a test), the network, time, threads (one greenlet each), the
model (a FakeRunner, whose tokens are a pure function of prompt, seed and position), the health
server and the log.

Workers are killed, frozen past their leases, cut off and drained; devices fail; Redis crashes and
loses what was not on disk; requests and replies are lost, or arrive after their sender gave up;
callers die and come back, cancel, and submit again. What every caller is given is compared with the
undisturbed generation, and when all has come to rest the laws I1 to I11 and I15 must hold.

Exits with 1 when a law was broken, or a control was not caught; prints the command that replays a
failing seed, and the trace of the first. SIM_JSON names a file for the figures.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from quire.cli.usage import positive
from tests.simulation.system.controls import CONTROLS, Control
from tests.simulation.system.schedule import Outcome, play
from tests.simulation.system.seams import installed

DEFAULT_RUNS = 10_000

#: Seeds a control has to be caught in, and how many catches are enough.
CONTROL_SEEDS = 400
CONTROL_CATCHES = 5

#: Schedules a process plays between two reports.
CHUNK = 25

#: Failing seeds that are told with their laws; the others are only counted.
MAX_TOLD = 10

COMMAND = "python -m tests.simulation.system"


@dataclass(slots=True)
class Figures:
    """What all schedules came to."""

    runs: int = 0
    failing: list[tuple[int, list[str]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    caught: dict[str, int] = field(default_factory=dict)

    def add(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.runs += 1
            self.counts += outcome.counts
            if outcome.violations:
                self.failing.append((outcome.seed, outcome.violations))

    def as_json(self, seconds: float) -> dict[str, object]:
        counts = self.counts
        return {
            "runs": self.runs,
            "violations": sum(len(violations) for _, violations in self.failing),
            "controls": len(CONTROLS),
            "controls_caught": sum(count > 0 for count in self.caught.values()),
            "seconds": round(seconds, 1),
            "kills": counts["kill a worker"] + counts["caller killed"],
            "pauses": counts["freeze a worker"],
            "redis_crashes": counts["crash Redis"] + counts["lose the tail"],
            "rollbacks": counts["rollbacks"],
            "rewinds": counts["commit rewind"],
            "fenced": counts["commit fenced"],
            "replays": counts["commit replayed"],
            "reaped": counts["leases reaped"],
            "resumed": counts["request resumed"],
            "cancels": counts["cancel"],
            "tokens": counts["tokens"],
            "later_turns": counts["later turns"],
            "kept_turns": counts["kept for a worker"],
            "lost_messages": counts["request_lost"] + counts["reply_lost"],
            "late_messages": counts["arrives_late"],
        }


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed)
    began, figures = time.monotonic(), Figures()
    with ProcessPoolExecutor(
        options.jobs,
        mp_context=get_context("fork"),
        # Steps fail here on purpose, and the engine would warn of each.
        initializer=logging.disable,
        initargs=(logging.WARNING,),
    ) as pool:
        chunks = list(_chunks(range(options.first_seed, options.first_seed + options.runs)))
        for done, outcomes in enumerate(pool.map(play_all, chunks), start=1):
            figures.add(outcomes)
            _show_progress(f"{done * CHUNK} of {options.runs} schedules")
        look = partial(catches, enough=options.catches)
        for control, count in zip(CONTROLS, pool.map(look, CONTROLS), strict=True):
            figures.caught[control.name] = count
    _report(figures, seconds=time.monotonic() - began)
    is_good = not figures.failing and all(figures.caught.values())
    return 0 if is_good else 1


def replay(seed: int) -> int:
    """Plays one schedule and tells everything that happened."""
    with installed():
        outcome = play(seed, keeps_trace=True)
    print(*outcome.trace, sep="\n")
    print(*(outcome.violations or [f"seed {seed}: all laws held"]), sep="\n")
    return 1 if outcome.violations else 0


def play_all(seeds: range) -> list[Outcome]:
    """Plays the schedules of the seeds, one after the other."""
    return list(_played(play, seeds))


def catches(control: Control, *, enough: int = CONTROL_CATCHES) -> int:
    """In how many schedules the control breaks its law; looks no further than `enough`."""
    control.check()
    broken = partial(play, sabotage=control.sabotage, runner=control.runner, plague=control.plague)
    seeds = range(control.first_seed, control.first_seed + CONTROL_SEEDS)
    # Closed at once: the seams stay in until it is.
    with closing(_played(broken, seeds)) as outcomes:
        caught = (
            outcome.seed
            for outcome in outcomes
            if any(text.startswith(control.law) for text in outcome.violations)
        )
        found = list(itertools.islice(caught, enough))
    if found and found[0] != control.first_seed:
        print(f"{control.name}: begin at the seed {found[0]}, not {control.first_seed}")
    return len(found)


def _played(player: Callable[[int], Outcome], seeds: range) -> Generator[Outcome, None, None]:
    """The outcomes of the seeds, each played when it is asked for."""
    gc.collect()
    # A schedule leaves little garbage in circles, and looking for it takes a tenth of the time.
    gc.disable()
    try:
        with installed():
            yield from map(player, seeds)
    finally:
        gc.enable()


def _chunks(seeds: range) -> Generator[range, None, None]:
    for first in range(0, len(seeds), CHUNK):
        yield seeds[first : first + CHUNK]


def _report(figures: Figures, *, seconds: float) -> None:
    if figures.failing:
        replay(figures.failing[0][0])
    for seed, violations in figures.failing[:MAX_TOLD]:
        print(f"seed {seed} breaks the laws; replay it with `{COMMAND} --seed {seed}`")
        print(*(f"    {violation}" for violation in violations), sep="\n")
    told = figures.as_json(seconds)
    for name, value in told.items():
        print(f"{name:16s} {value}")
    for name, count in figures.caught.items():
        print(f"control: {name}: {'caught' if count else 'NOT CAUGHT'} ({count})")
    if path := os.environ.get("SIM_JSON"):
        Path(path).write_text(json.dumps(told, indent=2) + "\n")


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, help="play this schedule alone, and tell all of it")
    parser.add_argument("--runs", type=positive, default=DEFAULT_RUNS, help="schedules to play")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--catches", type=int, default=CONTROL_CATCHES, help="how often a control must be caught"
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count(), help="processes that play")
    return parser


if __name__ == "__main__":
    sys.exit(main())
