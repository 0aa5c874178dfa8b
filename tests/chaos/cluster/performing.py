"""Plays one schedule or control in a process of its own, and reports what came of it."""

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.chaos.cluster.schedules import Plan, draw_control, draw_plan, play


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    kind: str
    figures: Counter[str]
    sentences: Sequence[str]


def perform(kind: str, name: str) -> Report:
    draw: Callable[[], Plan] = {
        "schedule": lambda: draw_plan(int(name)),
        "control": lambda: draw_control(name),
        "intact": lambda: replace(draw_control(name), broken=()),
    }[kind]
    try:
        outcome = play(draw())
    except Exception:  # noqa: BLE001 - a play that dies is a failed one.
        return Report(name, kind, Counter(), [traceback.format_exc()])
    return Report(name, kind, outcome.figures, outcome.violations)
