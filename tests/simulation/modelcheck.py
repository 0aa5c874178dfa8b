"""The exhaustive model check: every state the protocol can reach within bounds, and every law.

    python -m tests.simulation.modelcheck [name of a scenario or control ...]

Explores each scenario with the scripts as they are, which must break no law, and each control with
one thing broken on purpose, which must be caught. Nothing is cut: what a scenario allows is
explored to its last state, and its bounds are printed beside it. Prints a shortest way to a broken
law. The exit status is 1 when a law breaks, a control is not caught, or an answer of a script is
never met. MODELCHECK_JSON names a file to write the figures to. Runs on all cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from tests.simulation.controls import CONTROLS, Control
from tests.simulation.exploration import Result, explore
from tests.simulation.protocol_model import Scripts
from tests.simulation.world import Scenario

#: The variable that names the file for the figures.
JSON_VARIABLE = "MODELCHECK_JSON"

#: Two turns of one session, with empty answers: they meet in the ingress and not in their logs.
_TURNS = {"num_requests": 2, "num_tokens": 0, "max_attempts": 1, "shares_a_session": True}

#: What a test can afford. Between them they meet every answer of every script, too.
SMALL_SCENARIOS = (
    Scenario(
        "all endings",
        num_tokens=1,
        num_releases=1,
        may_cancel=True,
        may_be_late=True,
        may_be_poison=True,
    ),
    Scenario(
        "retries",
        num_tokens=1,
        may_cancel=True,
        may_be_late=True,
        may_fail=True,
        may_schedule=True,
    ),
    Scenario(
        "late calls",
        num_tokens=1,
        max_attempts=1,
        num_late_calls=1,
        num_releases=1,
        may_be_poison=True,
        may_fail=True,
    ),
    Scenario("a rollback", num_rollbacks=1, num_tokens=1, max_attempts=1),
    Scenario("expiry", num_expiries=1, num_tokens=1, max_attempts=1, may_schedule=True),
    Scenario("another life", num_expiries=1, num_requeues=1, num_tokens=0, max_attempts=1),
    Scenario("a pause", may_pause=True, num_tokens=1, max_attempts=1),
    Scenario("a loss", num_losses=1, num_tokens=1, max_attempts=1, may_schedule=True),
    Scenario(
        "one key for two",
        num_requests=2,
        num_tokens=0,
        max_attempts=1,
        num_rollbacks=1,
        shares_a_key=True,
    ),
    Scenario("a torn file", num_rollbacks=1, num_tokens=1, max_attempts=1, may_be_torn=True),
    Scenario("stateful noise", is_noise_stateful=True),
    Scenario("two turns", **_TURNS, may_cancel=True, may_be_late=True),
    Scenario("two turns, a loss", **_TURNS, num_losses=1),
)

SCENARIOS = (
    Scenario(
        "all endings",
        num_releases=1,
        may_cancel=True,
        may_be_late=True,
        may_be_poison=True,
        may_fail=True,
        may_schedule=True,
    ),
    Scenario("late calls", num_late_calls=2, max_attempts=1),
    Scenario(
        "late calls, all partings",
        num_tokens=1,
        num_late_calls=1,
        num_releases=1,
        may_be_poison=True,
        may_fail=True,
    ),
    # With two tokens and three lives: "a torn file" below.
    Scenario("a rollback", num_rollbacks=1, num_tokens=1, max_attempts=1, may_cancel=True),
    Scenario(
        "a rollback, late calls", num_rollbacks=1, num_late_calls=1, num_tokens=1, max_attempts=1
    ),
    Scenario(
        "a rollback, retries",
        num_rollbacks=1,
        num_tokens=1,
        max_attempts=1,
        may_fail=True,
        may_schedule=True,
    ),
    Scenario("a rollback, a pause", num_rollbacks=1, num_tokens=0, max_attempts=1, may_pause=True),
    Scenario(
        "a rollback, another life", num_rollbacks=1, num_requeues=1, num_tokens=1, max_attempts=1
    ),
    Scenario("a torn file", num_rollbacks=1, max_attempts=1, may_cancel=True, may_be_torn=True),
    Scenario("two rollbacks", num_rollbacks=2, num_tokens=1, max_attempts=1),
    Scenario(
        "expiry", num_expiries=1, num_tokens=1, max_attempts=1, may_fail=True, may_schedule=True
    ),
    Scenario("expiry, a rollback", num_expiries=1, num_rollbacks=1, num_tokens=0, max_attempts=1),
    Scenario("expiry, another life", num_expiries=1, num_requeues=1, num_tokens=1, max_attempts=1),
    Scenario("expiry, late calls", num_expiries=1, num_late_calls=1, num_tokens=1, max_attempts=1),
    Scenario(
        "losses",
        num_losses=2,
        num_tokens=1,
        max_attempts=1,
        num_releases=1,
        may_cancel=True,
        may_schedule=True,
    ),
    Scenario(
        "a loss, retries",
        num_losses=1,
        num_tokens=1,
        may_be_late=True,
        may_fail=True,
        may_schedule=True,
    ),
    Scenario("losses, late calls", num_losses=2, num_late_calls=1, num_tokens=1, max_attempts=1),
    Scenario("losses, a pause", num_losses=2, num_tokens=0, may_pause=True),
    Scenario("a loss, a rollback", num_losses=1, num_rollbacks=1, num_tokens=0, max_attempts=1),
    Scenario(
        "a loss, another life",
        num_losses=1,
        num_expiries=1,
        num_requeues=1,
        num_tokens=0,
        max_attempts=1,
    ),
    Scenario("two, losses", num_requests=2, num_losses=2, num_tokens=0, max_attempts=1),
    Scenario("two, late calls", num_requests=2, num_tokens=1, max_attempts=1, num_late_calls=1),
    Scenario("two, cancelled", num_requests=2, num_tokens=1, max_attempts=1, may_cancel=True),
    # Where it would be too many, two requests have empty answers: they meet in the ingress and the
    # books, and not in their logs.
    Scenario(
        "two, late calls, retries",
        num_requests=2,
        num_tokens=0,
        max_attempts=1,
        num_late_calls=1,
        may_fail=True,
    ),
    Scenario("two, a rollback", num_requests=2, num_tokens=0, max_attempts=1, num_rollbacks=1),
    Scenario(
        "one key for two",
        num_requests=2,
        num_tokens=1,
        max_attempts=1,
        num_late_calls=1,
        num_rollbacks=1,
        shares_a_key=True,
    ),
    Scenario("stateful noise", is_noise_stateful=True),
    Scenario(
        "stateful noise, told",
        num_rollbacks=1,
        num_tokens=1,
        max_attempts=1,
        is_noise_stateful=True,
        may_contradict=True,
    ),
    Scenario("two turns", **{**_TURNS, "num_tokens": 1}, may_cancel=True, may_be_late=True),
    Scenario("two turns, late calls", **_TURNS, num_late_calls=1, num_releases=1, may_fail=True),
    Scenario("two turns, for later", **_TURNS, may_schedule=True, may_fail=True, may_cancel=True),
    Scenario("two turns, a rollback", **_TURNS, num_rollbacks=1, may_be_torn=True),
    Scenario("two turns, losses", **_TURNS, num_losses=2, may_cancel=True),
    Scenario("two turns, expiry", **_TURNS, num_expiries=1, num_late_calls=1),
    Scenario("two turns, another life", **_TURNS, num_expiries=1, num_requeues=1),
    Scenario(
        "three turns",
        num_requests=3,
        num_tokens=0,
        max_attempts=1,
        shares_a_session=True,
        may_cancel=True,
    ),
)

#: Every answer the scripts can give while all brokers have the same settings.
OUTCOMES = frozenset(
    (name, outcome)
    for name, outcomes in {
        "submit": "created known held",
        "cancel": "none running completed failed cancelled expired",
        "claim": "claimed running scheduled finished cancelled expired missing paused earlier_turn",
        "commit": "ok replayed rewind fenced",
        "heartbeat": "True False",
        "release": "True False",
        "fail": "none scheduled failed cancelled expired",
        "dead_letter": "True False",
        "reap": "none queued failed cancelled expired",
        "promote": "none queued expired",
        "expire": "none cancelled expired",
        "requeue": "queued superseded",
        "restore": "none entry delay lease wait record",
        "balance": "True",
    }.items()
    for outcome in outcomes.split()
)


def main(wanted: Sequence[str]) -> int:
    """Runs what is wanted, everything by default; returns the exit status."""
    began = time.monotonic()
    scenarios = [s for s in SCENARIOS if not wanted or s.name in wanted]
    controls = [c for c in CONTROLS if not wanted or c.name in wanted]
    searches = searched(
        [*((s, Scripts) for s in scenarios), *((c.scenario, c.kind) for c in controls)]
    )
    results = [checked(result) for _, result in zip(scenarios, searches, strict=False)]
    print()
    caught = [tried(c, next(searches)) for c in controls]
    violations = sum(result.violation is not None for result in results)
    missed = never_met(results) if not wanted else []
    figures = {
        "states": sum(result.num_states for result in results),
        "steps": sum(result.num_steps for result in results),
        "violations": violations,
        "runs": len(results) + len(caught),
        "controls": len(caught),
        "controls_caught": sum(caught),
        "outcomes": len(OUTCOMES),
        "outcomes_met": len(OUTCOMES) - len(missed),
        "seconds": round(time.monotonic() - began, 1),
        "scenarios": {result.scenario.name: result.num_states for result in results},
    }
    print()
    for name, value in list(figures.items())[:-1]:
        print(f"{name:16} {value}")
    for name, outcome in missed:
        print(f"never met: {name} answering {outcome}")
    if path := os.environ.get(JSON_VARIABLE):
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
    return int(bool(violations or missed) or not all(caught))


def searched(tasks: Sequence[tuple[Scenario, type[Scripts]]]) -> Iterator[Result]:
    """The results in the order of the tasks, each searched in a process of its own."""
    # Forked, so that nothing is imported twenty times; one task each, as its memory is large.
    context = multiprocessing.get_context("fork")
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        yield from pool.imap(search, tasks)


def search(task: tuple[Scenario, type[Scripts]]) -> Result:
    return explore(*task)


def checked(result: Result) -> Result:
    print(summary(result), flush=True)
    if result.violation:
        print(f"BROKEN\n{result.violation}")
    return result


def summary(result: Result) -> str:
    """A line that says how much was explored, and within which bounds."""
    scenario = result.scenario
    return (
        f"{scenario.name:26} {result.num_states:9,} states {result.num_steps:10,} steps"
        f"  depth {result.depth:3}  {result.seconds:6.1f} s  {bounds(scenario)}"
    )


def bounds(scenario: Scenario) -> str:
    """What may happen in a scenario, and how often."""
    values = {field.name: getattr(scenario, field.name) for field in fields(Scenario)[1:]}
    return ", ".join(
        name if value is True else f"{name.removeprefix('num_')}={value}"
        for name, value in values.items()
        if value is not False and (value != 0 or name == "num_tokens")
    )


def tried(control: Control, result: Result) -> bool:
    """Whether the control breaks the law it was made to break."""
    violation = result.violation
    is_caught = violation is not None and violation.broken[0].startswith(control.law)
    found = f"caught by {control.law}" if is_caught else "NOT CAUGHT"
    print(f"control: {control.name:30} {found}", flush=True)
    if violation is not None and not is_caught:
        print(violation)
    return is_caught


def never_met(results: Iterable[Result]) -> list[tuple[str, str]]:
    """The answers of scripts that no scenario has met: what they lead to was not checked."""
    return sorted(OUTCOMES.difference(*(result.outcomes for result in results)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
