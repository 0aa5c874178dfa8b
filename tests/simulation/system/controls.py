"""Negative controls: the system with one thing broken on purpose, which the laws must notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.fake_runner import FakeRunner
from quire.queue.scripts import load_source
from tests.simulation.system.fleet import StatefulRunner

_FENCE = "return fields.state == 'running' and fields.epoch == epoch and fields.owner == owner"


@dataclass(frozen=True, slots=True)
class Control:
    """A broken system, and the law that must be seen to break."""

    name: str
    law: str
    #: Texts of the Lua scripts, and what stands in their place.
    sabotage: Mapping[str, str] = field(default_factory=dict)
    runner: type[FakeRunner] = FakeRunner
    #: The fault under which it shows; empty where any will do.
    plague: str = ""
    #: The first seed that is tried; one that catches it saves time. If a change of the system makes
    #: that schedule harmless, the search goes on with the next seeds.
    first_seed: int = 0

    def check(self) -> None:
        """A control that changes nothing proves nothing. AssertionError."""
        for text in self.sabotage:
            scripts = ("submit", "claim", "commit", "cancel", "release", "reap", "fail", "restore")
            assert any(text in load_source(name) for name in scripts), f"no script has {text!r}"


CONTROLS = (
    Control(
        "without a fence, zombies publish",
        "I4",
        {_FENCE: "return fields.state == 'running'"},
        plague="freeze a worker",
        first_seed=4,
    ),
    Control(
        "the epoch alone is no fence when Redis loses its tail",
        "I4",
        {_FENCE: "return fields.state == 'running' and fields.epoch == epoch"},
        plague="lose the tail",
        first_seed=256,
    ),
    Control(
        "noise from a generator with a state differs once Redis lost its tail",
        "I1",
        runner=StatefulRunner,
        plague="lose the tail",
        first_seed=27,
    ),
    Control(
        "a commit that accepts a gap leaves one",
        "I2",
        {"if item.start > published then": "if false then"},
        first_seed=56,
    ),
    Control(
        "what is not put back waits until its time is over",
        "I5",
        {"  replies[#replies + 1] = restore(": "  replies[#replies + 1] = tostring("},
        plague="lose the queue",
        first_seed=1,
    ),
    Control(
        "a turn that is never parked does not wait for the one before it",
        "I15",
        {"return first ~= nil and first ~= id": "return false"},
        first_seed=6,
    ),
    Control(
        "turns that are numbered backwards run out of order",
        "I15",
        {"= string.format('%016.0f', tonumber": "= string.format('%016.0f', 9e15 - tonumber"},
        first_seed=119,
    ),
    Control(
        "a claim past the books unbalances them",
        "I10",
        {"enter(keys, id, 'running')": "redis.call('HSET', keys.record, 'state', 'running')"},
    ),
)
