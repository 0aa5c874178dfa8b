"""Breadth-first search through all worlds of a scenario, each checked against the laws.

The first broken law ends the search; as the search is breadth-first, the way to it is a shortest
one.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tests.simulation.canonical import Reductions, canonical
from tests.simulation.laws import Closings, broken_by_step, broken_in_shard, broken_in_world
from tests.simulation.model_state import Call, Shard
from tests.simulation.processes import Processes
from tests.simulation.protocol_model import Scripts
from tests.simulation.world import Scenario, Step, World, scripts_of


@dataclass(frozen=True, slots=True)
class Violation:
    """The laws broken, as sentences, and the steps that led there."""

    broken: tuple[str, ...]
    trace: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"  {number:3} {step}" for number, step in enumerate(self.trace, start=1)]
        return "\n".join([*self.broken, *lines])


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found. `seconds` of processor time."""

    scenario: Scenario
    num_states: int
    num_steps: int
    num_closing_states: int
    depth: int
    seconds: float
    outcomes: frozenset[tuple[str, str]]
    violation: Violation | None


def explore(scenario: Scenario, kind: type[Scripts] = Scripts) -> Result:
    """Searches the whole scenario, with the real scripts or with doctored ones."""
    search = Search(scenario, kind)
    began = time.process_time()
    with no_collection():
        violation = search.run()
    return Result(
        scenario=scenario,
        num_states=len(search.numbers),
        num_steps=search.num_steps,
        num_closing_states=search.closings.num_states,
        depth=search.depth,
        seconds=time.process_time() - began,
        outcomes=frozenset(search.processes.outcomes),
        violation=violation,
    )


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Nobody looks for garbage: millions of small tuples are made, and none is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Search:
    """The states found so far, by number, and from which state each was found."""

    def __init__(self, scenario: Scenario, kind: type[Scripts]) -> None:
        self.processes = Processes(scenario, scripts_of(scenario, kind))
        self._reductions = Reductions(knows_owners=kind.holds is Scripts.holds)
        # With processes of their own: what only a closing meets is not met by the search.
        self.closings = Closings(Processes(scenario, self.processes.scripts), self._reductions)
        self._first = World.initial(scenario)
        self.numbers = {self._canonical(self._first): 0}
        self.num_steps = 0
        self.depth = 0
        #: Where each kind of answer of each script was met first: from which state, by which step.
        self.firsts: dict[tuple[str, str], tuple[int, Step]] = {}
        self._parents = [0]
        self._depths = [0]
        #: What has been judged already: shards, and operations that led from one to another.
        self._shards: set[Shard] = set()
        self._taken: set[tuple[Shard, tuple[Call, ...], Shard]] = set()

    def run(self, *, max_states: int | None = None) -> Violation | None:
        """Goes on until all is explored or a law is broken; or ends once it has `max_states`."""
        waiting = deque(self.numbers)
        while waiting and (max_states is None or len(self.numbers) < max_states):
            world = waiting.popleft()
            number = self.numbers[world]
            # Of two workers that are alike, one is as good as the other.
            actors = range(len(set(world.workers)))
            for step in self.processes.steps(world, workers=actors):
                self.num_steps += 1
                if len(self.firsts) < len(self.processes.outcomes):
                    for outcome in self.processes.outcomes - self.firsts.keys():
                        self.firsts[outcome] = number, step
                broken = self._broken_by_step(world, step)
                if not broken and (step.world == world or step.world in self.numbers):
                    continue
                after = self._canonical(step.world)
                if after not in self.numbers:
                    self._add(after, found_from=number)
                    waiting.append(after)
                    broken += self._broken(step.world, after)
                if broken:
                    return Violation(tuple(broken), self.way_to(number, step))
        return None

    def _canonical(self, world: World) -> World:
        return canonical(world, self._reductions)

    def _add(self, world: World, *, found_from: int) -> None:
        self.numbers[world] = len(self.numbers)
        self._parents.append(found_from)
        self.depth = self._depths[found_from] + 1
        self._depths.append(self.depth)

    def _broken_by_step(self, world: World, step: Step) -> list[str]:
        taken = world.shard, step.calls, step.world.shard
        if taken in self._taken:
            return []
        self._taken.add(taken)
        return list(broken_by_step(*taken))

    def _broken(self, raw: World, world: World) -> list[str]:
        broken = []
        if world.shard not in self._shards:
            self._shards.add(world.shard)
            broken += broken_in_shard(raw.shard, scenario=self.processes.scenario)
        broken += broken_in_world(raw, processes=self.processes)
        broken += self.closings.broken(world)
        return broken

    def way_to(self, number: int, last: Step) -> tuple[Step, ...]:
        """The way once more under one naming: a representative has owners of its own."""
        worlds, numbers = list(self.numbers), [number]
        while numbers[-1]:
            numbers.append(self._parents[numbers[-1]])
        targets = [worlds[n] for n in numbers[-2::-1]]
        world, way = self._first, []
        for target in targets:
            way.append(self._step_to(target, world))
            world = way[-1].world
        return (*way, self._step_to(self._canonical(last.world), world, like=last))

    def _step_to(self, target: World, world: World, *, like: Step | None = None) -> Step:
        kind = like and kind_of(like)
        return next(
            step
            for step in self.processes.steps(world)
            if kind in (None, kind_of(step)) and self._canonical(step.world) == target
        )


def kind_of(step: Step) -> tuple[str, list[str]]:
    return step.what, [call.name for call in step.calls]
