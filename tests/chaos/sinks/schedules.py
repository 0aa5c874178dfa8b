"""Draws the schedule of a batch from a seed, and plays it: a batch over HTTP, and what goes wrong.

As in `tests.chaos.schedules`, the seed fixes the plan; how processes interleave is the machine's.
Redis dies without losing anything: records of batches are as durable as Redis is.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from quire.queue.scripts import load_source
from quire.transport.script_calls import script_sha
from tests.chaos.schedules import FAKE_FLAGS, LEASE_SECONDS, Fault, text_after, tokens_under
from tests.chaos.sinks.caller import ENDPOINT
from tests.chaos.sinks.services import READY, Service
from tests.chaos.sinks.stage import SinkStage
from tests.chaos.stage import Cast, Outcome, Stuck

#: Of so many schedules one plays a batch. No such seed has the embedded model.
BATCH_EVERY, BATCH_REST = 5, 3

#: What may go wrong, and how often against the others.
FAULTS = {
    "kill_gateway": 3,
    "kill_batcher": 5,
    "kill_notifier": 5,
    "kill_worker": 2,
    "pause_gateway": 2,
    "pause_batcher": 4,
    "pause_notifier": 3,
    "drain_gateway": 1,
    "drain_batcher": 2,
    "drain_notifier": 2,
    "lose_replies": 3,
    "crash_redis": 1,
    "stall_redis": 1,
}
NUM_FAULTS = (4, 8)
NUM_LINES = (20, 60)
NUM_RESPONSES = (1, 4)
#: How many batches are cancelled, and how many of their lines are wrong.
CANCELLED_SHARE, WRONG_SHARE = 0.15, 0.05
#: How long a batch that a stopped batcher may hold is waited for.
TAKEOVER_SECONDS = 2.5
#: What a reply may be lost to.
LOSABLE = (
    *("batches/create_batch", "batches/claim_batch", "batches/save_batch", "batches/finish_batch"),
    *("batches/publish_file", "submit", "commit", "XREADGROUP", "XACK", "XREAD"),
)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """All that a seed says. `texts`: custom_id -> what must come of the line."""

    seed: int
    cast: Cast
    lines: tuple[Mapping[str, Any], ...]
    texts: Mapping[str, str]
    faults: tuple[Fault, ...]
    #: Bodies of responses in the background.
    responses: tuple[Mapping[str, Any], ...] = ()


def has_batch(seed: int) -> bool:
    """Whether the schedule of a seed plays a batch."""
    return seed % BATCH_EVERY == BATCH_REST


def draw_batch(seed: int) -> BatchPlan:
    """The plan of a seed: always the same."""
    random_ = random.Random(f"batch {seed}")
    kinds = random_.choices(
        list(FAULTS), weights=list(FAULTS.values()), k=random_.randint(*NUM_FAULTS)
    )
    if random_.random() < CANCELLED_SHARE:
        kinds.append("cancel")
    shares = sorted(random_.random() for _ in kinds)
    random_.shuffle(kinds)
    lines, texts = draw_lines(random_, random_.randint(*NUM_LINES))
    return BatchPlan(
        seed=seed,
        cast=Cast(FAKE_FLAGS, LEASE_SECONDS, 20, random_.choice((0.002, 0.004, 0.008))),
        lines=lines,
        texts=texts,
        faults=tuple(Fault(kind, share) for kind, share in zip(kinds, shares, strict=True)),
        responses=draw_responses(random.Random(f"responses {seed}")),
    )


def draw_responses(random_: random.Random) -> tuple[Mapping[str, Any], ...]:
    """Bodies of responses, apart from the other draws."""
    return tuple(
        {
            "input": f"question {random_.randrange(1 << 20)}",
            "max_output_tokens": random_.choice((16, 40, 120)),
        }
        for _ in range(random_.randint(*NUM_RESPONSES))
    )


def draw_lines(
    random_: random.Random, count: int
) -> tuple[tuple[Mapping[str, Any], ...], Mapping[str, str]]:
    """Lines of a batch, and what must come of each."""
    lines, texts = [], {}
    for number in range(count):
        prompt = [random_.randrange(1, 257) for _ in range(random_.randint(1, 20))]
        size = {"max_tokens": random_.choice((1, 5, 20, 60)), "seed": random_.randrange(1 << 30)}
        body: dict[str, Any] = {"prompt": prompt, **size}
        name = f"row-{number}"
        texts[name] = text_after(prompt, tokens_under({}, prompt, **size))
        if random_.random() < WRONG_SHARE:
            body["top_p"], texts[name] = 7, "invalid_request"
        lines.append({"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body})
    return tuple(lines), texts


def play_batch(plan: BatchPlan) -> Outcome:
    """Plays a plan to its end. Stuck when something that had to come never came."""
    with SinkStage(
        plan.cast,
        name=f"batch-{plan.seed}",
        lines=plan.lines,
        texts=plan.texts,
        responses=plan.responses,
    ) as stage:
        _Play(plan, stage).run()
        return stage.outcome


class _Play:
    """One performance. Every fault leaves at least one process of each kind that can go on."""

    def __init__(self, plan: BatchPlan, stage: SinkStage) -> None:
        self._plan = plan
        self._stage = stage
        self._random = random.Random(f"{plan.seed} victims of a batch")

    def run(self) -> None:
        stage = self._stage
        for _ in range(2):
            stage.start_worker()
            for kind in READY:
                stage.start_service(kind)
        stage.start_followers()
        for fault in self._plan.faults:
            stage.until(
                lambda due=fault.share: stage.progress >= due or stage.caller.is_through,
                "progress",
            )
            what, _, kind = fault.kind.partition("_")
            if kind in READY:
                victims: Callable[[str], None] = getattr(self, f"_{what}_service")
                victims(kind)
            else:
                strike: Callable[[], None] = getattr(self, f"_{fault.kind}")
                strike()
            stage.outcome.figures[f"fault_{fault.kind}"] += 1
        stage.finish()

    def _kill_service(self, kind: str) -> None:
        self._victim_of(kind).kill()
        self._stage.outcome.figures[f"{kind}_kills"] += 1
        self._stage.start_service(kind)

    def _pause_service(self, kind: str) -> None:
        """Stops a process; half the time it sleeps through the next faults, too.

        A batcher sleeps until another one holds what it held.
        """
        stage = self._stage
        stage.resume_all()
        if len(stage.active_of(kind)) < 2:
            stage.start_service(kind)
        sleeper, before = self._victim_of(kind), stage.holder
        sleeper.pause()
        stage.outcome.figures["pauses"] += 1
        stage.outcome.figures[f"{kind}_pauses"] += 1
        if kind == "batcher" and before:
            # The batch may be another's, which has renewed its lease.
            with contextlib.suppress(Stuck):
                stage.until(lambda: stage.holder != before, "a takeover", seconds=TAKEOVER_SECONDS)
        if self._random.random() < 0.5:
            sleeper.resume()

    def _drain_service(self, kind: str) -> None:
        stage = self._stage
        leaver = self._victim_of(kind)
        stage.start_service(kind)
        leaver.terminate()
        stage.until(lambda: not leaver.is_alive, f"the drain of {leaver.name}")
        stage.outcome.figures["drains"] += 1

    def _victim_of(self, kind: str) -> Service:
        stage = self._stage
        if not stage.active_of(kind):
            stage.start_service(kind)
        victim = self._random.choice(stage.active_of(kind))
        stage.wait_for_service(victim)
        return victim

    def _kill_worker(self) -> None:
        self._stage.wait_for_workers()
        self._stage.kill_worker(self._random.choice(self._stage.active))
        self._stage.start_worker()

    def _lose_replies(self) -> None:
        for _ in range(self._random.randint(1, 4)):
            name = self._random.choice(LOSABLE)
            self._stage.wire.lose_reply(name if name.isupper() else script_sha(load_source(name)))

    def _crash_redis(self) -> None:
        stage = self._stage
        stage.crash_redis(lambda size: size)
        # The connection of the stage was to the one before.
        with contextlib.suppress(RedisError):
            stage.connection.ping()
        stage.connection.ping()

    def _stall_redis(self) -> None:
        self._stage.stall_redis(self._plan.cast.lease_seconds * self._random.uniform(0.5, 1.5))

    def _cancel(self) -> None:
        # With the batch, half of its responses.
        for caller in self._stage.followers[::2]:
            caller.cancel()
