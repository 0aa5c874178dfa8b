"""Runs the model and the real scripts side by side, and compares them after every operation."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from quire.errors import QuireError
from tests.simulation.accidents import torn
from tests.simulation.model_state import OPEN, Call, Shard, with_late_waits
from tests.simulation.processes import Processes, outcome_of
from tests.simulation.protocol_model import Scripts
from tests.simulation.real_shard import RealShard
from tests.simulation.world import NOTHING, Scenario, Step, World, described

#: How often a call that was made before is made again, by whomever, however old.
REPEATED = 0.15

#: How likely kinds of steps are, where not 1.
WEIGHTS = {
    "claim": 4.0,
    "commit": 6.0,
    "peek": 2.0,
    "expire_lease": 0.5,
    "reads": 0.1,
    "release": 0.5,
    "snapshot": 0.3,
    "submit": 2.0,
}

#: What the server loses.
LOSSES = ("lose_rank", "stay_ranked", "lose_ticket", "lose_delay", "lose_lease", "lose_wait")

#: Kinds of steps that bring a walk to an early end or make it forget where it was. In each walk
#: some of them are rarer by this factor.
RARER = 0.02
DISRUPTIVE = {
    "cancel": 0.15,
    "crashes": 0.3,
    "dead_letter": 0.3,
    "fail": 0.5,
    "forget": 0.1,
    **dict.fromkeys(LOSSES, 0.3),
    "gives up": 0.5,
    "pass_deadline": 0.005,
    "pass_queue_time": 0.05,
    "pause": 0.1,
    "rollback": 3.0,
    "tear": 3.0,
}

#: Operations that are not calls of a client, and so are not repeated.
NOT_REPEATED = (
    *("peek", "balance", "snapshot", "rollback", "tear", "forget", "pass_deadline"),
    *LOSSES,
)


class Divergence(AssertionError):
    """The model and the scripts disagree."""


class Lockstep:
    """One shard twice. `shard` is what both are known to agree on."""

    def __init__(self, real: RealShard, scripts: Scripts) -> None:
        self.real = real
        self.scripts = scripts
        self.shard = Shard.empty(len(real.names))
        #: Every operation with each kind of answer it has given so far.
        self.outcomes: set[tuple[str, str]] = set()
        self._disk: Shard | tuple[()] = NOTHING

    def run(self, call: Call) -> Any:
        """Makes the call on both and returns the reply. Divergence."""
        shard, expected = self._on_model(call)
        story = [described(call), f"  before: {self.shard}", f"  the model answers {expected}"]
        try:
            reply = self.real.run(call, late=shard.clock.late)
            observed = self.real.observe(shard.clock)
        except (AssertionError, QuireError) as error:
            raise Divergence("\n".join([*story, f"  the script: {error!r}"])) from error
        if reply != expected or observed != shard:
            story += [f"  the script answers {reply}", *differences(shard, observed)]
            raise Divergence("\n".join(story))
        for kind in kinds_of_reply(expected):
            self.outcomes.add((call.name, kind))
        self.shard = shard
        return reply

    def _on_model(self, call: Call) -> tuple[Shard, Any]:
        if call.name == "snapshot":
            self._disk = self.shard
            return self.shard, None
        if call.name in ("rollback", "tear"):
            assert self._disk != NOTHING
            disk = self._disk
            if call.name == "tear":
                disk = torn(
                    disk, self.shard, call.request, has_end=call.flag, is_told=call.entry == 1
                )
            return with_late_waits(disk._replace(clock=self.shard.clock)), None
        if call.name == "promote":
            # The broker's promote looks after all that wait.
            shard, promoted = self._on_all(self.shard, call)
            return self._on_all(shard, call._replace(name="expire"))[0], promoted
        if call.name == "reap" or (call.name == "expire" and not call.flag):
            return self._on_all(self.shard, call)
        shard, reply = self.scripts.run(self.shard, call._replace(holder=-1))
        if call.name == "submit" and reply[0] == "held":
            # As the broker does: once more, with the holder that was found.
            return self.scripts.run(shard, call._replace(holder=reply[1]))
        return shard, reply

    def _on_all(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """The broker reaps, promotes and expires whatever is due."""
        replies = []
        for index in range(len(shard.requests)):
            shard, state = self.scripts.run(shard, call._replace(request=index))
            if state:
                replies.append((index, state))
        return shard, tuple(replies)


def differences(model: Shard, real: Shard) -> list[str]:
    return [
        f"  {name}: {one} in the model, {other} in Redis"
        for name, one, other in zip(Shard._fields, model, real, strict=True)
        if one != other
    ]


def kinds_of_reply(reply: Any) -> list[str]:
    """The kinds of an answer; one that is about many requests has one for each."""
    if isinstance(reply, tuple) and all(isinstance(part, tuple) for part in reply):
        return [str(part[-1]) for part in reply] or ["none"]
    return [outcome_of(reply)]


def walk(lockstep: Lockstep, scenario: Scenario, *, seed: int, num_steps: int) -> None:
    """Takes a random path of the model, with old calls made again, on both. Divergence."""
    choose = random.Random(seed)
    processes = Processes(scenario, lockstep.scripts)
    world, made = World.initial(scenario), list[Call]()
    rarer = {kind: weight * choose.choice((RARER, 1.0)) for kind, weight in DISRUPTIVE.items()}
    weights = rarer | WEIGHTS
    for _ in range(num_steps):
        if made and choose.random() < REPEATED:
            lockstep.run(choose.choice(made[-30:]))
            world = world._replace(shard=lockstep.shard)
            continue
        if all(request and request.state not in OPEN for request in world.shard.requests):
            # Nothing more would happen: one of them may live again.
            lockstep.run(Call("forget", choose.randrange(scenario.num_requests)))
            world = world._replace(shard=lockstep.shard)
            continue
        step = chosen_step(choose, processes, world, weights=weights)
        for call in step.calls:
            lockstep.run(call)
            if call.name not in NOT_REPEATED:
                made.append(call)
        world = step.world._replace(shard=lockstep.shard)


def chosen_step(
    choose: random.Random, processes: Processes, world: World, *, weights: Mapping[str, float]
) -> Step:
    """One of the steps that change something: first its kind is drawn, then the step."""
    by_kind: dict[str, list[Step]] = {}
    for step in processes.steps(world):
        if step.world != world:
            kind = step.calls[0].name if step.calls else step.what.partition("(")[0]
            by_kind.setdefault(kind, []).append(step)
    kinds = sorted(by_kind)
    (kind,) = choose.choices(kinds, [weights.get(kind, 1.0) for kind in kinds])
    return choose.choice(by_kind[kind])
