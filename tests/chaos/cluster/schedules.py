"""Draws a schedule on a cluster from a seed, and plays it. The seed fixes the whole plan."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.queue.submit.routing import shard_of
from tests.chaos.callers import Wanted
from tests.chaos.cluster.stage import NUM_SHARDS, PATIENCE_SECONDS, ClusterStage
from tests.chaos.cluster.worker import NEVER_ASKS, NOT_FOLLOWED
from tests.chaos.schedules import FAKE_FLAGS, Fault, _draw_fake
from tests.chaos.stage import Cast, Outcome, Stuck

#: Shorter than a failover, so that leases run out in one.
LEASE_SECONDS = 2.0
NUM_WORKERS = 2
FAULTS = {"kill_master": 3, "lose_tail": 3, "move": 5, "switch": 2, "kill": 3, "pause": 2}
#: Every schedule has these, and a few more.
ALWAYS = ("lose_tail", "move")
NUM_MORE = (2, 4)
#: Controls by name: the fault that finds them.
CONTROLS = {"rewind ignored": "lose_tail", NEVER_ASKS: "kill_for_good", NOT_FOLLOWED: "move"}
#: Faults that strike once in a play.
ONCE = ("kill_for_good",)
#: Controls that stop a play for ever are not waited for as long.
CONTROL_PATIENCE_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed says; and for a control, in which way each worker is broken."""

    seed: int
    cast: Cast
    wanted: tuple[Wanted, ...]
    faults: tuple[Fault, ...]
    broken: tuple[str, ...] = ()


def draw_plan(seed: int) -> Plan:
    """The plan of a seed: always the same."""
    random_ = random.Random(f"cluster {seed}")
    more = random_.choices(
        list(FAULTS), weights=list(FAULTS.values()), k=random_.randint(*NUM_MORE)
    )
    kinds = [*ALWAYS, *more]
    random_.shuffle(kinds)
    cast = Cast(
        flags=FAKE_FLAGS,
        lease_seconds=LEASE_SECONDS,
        max_attempts=20,
        step_seconds=random_.choice((0.01, 0.02)),
    )
    shares = sorted(random_.uniform(0.05, 0.8) for _ in kinds)
    faults = tuple(Fault(kind, share) for kind, share in zip(kinds, shares, strict=True))
    wanted = tuple(_in_no_session(item) for item in _draw_fake(random_, seed=seed))
    return Plan(seed, cast, wanted, faults)


def draw_control(name: str) -> Plan:
    """A plan in which a worker that is broken in this way must be found."""
    plan = draw_plan(0)
    kind = CONTROLS[name]
    faults = tuple(Fault(kind, share) for share in (0.15, 0.3, 0.45)[: 1 if kind in ONCE else 3])
    return replace(plan, faults=faults, broken=(name,))


def play(plan: Plan) -> Outcome:
    """Plays a plan to its end. What never came is a violation."""
    patience = CONTROL_PATIENCE_SECONDS if plan.broken else PATIENCE_SECONDS
    with ClusterStage(plan.cast, plan.wanted, patience=patience) as stage:
        try:
            _Play(plan, stage).run()
        except Stuck as stuck:
            stage.outcome.violations.append(str(stuck))
        return stage.outcome


class _Play:
    def __init__(self, plan: Plan, stage: ClusterStage) -> None:
        self._plan = plan
        self._stage = stage
        self._random = random.Random(f"{plan.seed} victims of a cluster")
        self._num_tokens = sum(len(item.tokens) for item in plan.wanted)

    def run(self) -> None:
        stage = self._stage
        for _ in range(NUM_WORKERS):
            stage.start_worker(*self._plan.broken)
        stage.start_readers()
        for fault in self._plan.faults:
            due = int(fault.share * self._num_tokens)
            stage.until(lambda due=due: stage.num_tokens >= due or stage.has_ended, "progress")
            strike: Callable[[], None] = getattr(self, f"_{fault.kind}")
            strike()
            stage.outcome.figures[f"fault_{fault.kind}"] += 1
        stage.finish()

    def _busy_shard(self) -> int:
        """A shard with a request that is not through."""
        open_ = [one.request_id for one in self._stage.callers if not one.is_through]
        shards = sorted({shard_of(request_id, NUM_SHARDS) for request_id in open_})
        return self._random.choice(shards or range(NUM_SHARDS))

    def _kill_master(self, *, loses_tail: bool = False) -> None:
        keys = self._stage.brokers[self._busy_shard()].keys
        self._stage.kill_master(self._stage.cluster.owner(keys), loses_tail=loses_tail)

    def _kill_for_good(self) -> None:
        # One that comes back says itself who owns its slots now.
        node = self._stage.cluster.owner(self._stage.brokers[self._busy_shard()].keys)
        self._stage.kill_master(node, loses_tail=False, comes_back=False)

    def _lose_tail(self) -> None:
        self._kill_master(loses_tail=True)

    def _switch(self) -> None:
        keys = self._stage.brokers[self._busy_shard()].keys
        self._stage.switch(self._stage.cluster.owner(keys))

    def _move(self) -> None:
        self._stage.move(self._busy_shard())

    def _kill(self) -> None:
        self._stage.wait_for_workers()
        victim = self._random.choice(self._stage.active)
        victim.scrape()
        victim.kill()
        self._stage.start_worker(*self._plan.broken)

    def _pause(self) -> None:
        """Stops a worker until its leases are gone, and lets it go on."""
        stage = self._stage
        stage.wait_for_workers()
        sleeper = self._random.choice(stage.active)
        sleeper.pause()
        limits = [broker.now_ms() + LEASE_SECONDS * 1000 for broker in stage.brokers]

        def reaped() -> bool:
            lowest = [shard.lowest_lease for shard in stage.shards()]
            return all(
                score is None or score > limit for score, limit in zip(lowest, limits, strict=True)
            )

        stage.until(reaped, f"the leases of {sleeper.name} reaped")
        sleeper.resume()


def _in_no_session(item: Wanted) -> Wanted:
    # The turns of a session are in one shard, which an id that the plan chooses need not be in.
    return replace(item, request=item.request.model_copy(update={"session_id": None}))
