"""Draws a schedule from a seed, and plays it: requests, workers, and what goes wrong and when.

The seed fixes the plan: every request, every fault, its victim and the progress at which it
strikes. How threads and processes interleave around it is the machine's, and new in each run.
"""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.output.detokenizer import StreamDecoder
from quire.errors import UnknownRequest
from quire.queue.scripts import load_source
from quire.transport.script_calls import script_sha
from quire.wire.constraints import Constraint, Kind
from quire.wire.protocol import GenerationRequest, Priority
from tests.chaos.adapters import NAMES
from tests.chaos.callers import Wanted, draw_departures
from tests.chaos.hybrid import HYBRID
from tests.chaos.real import (
    REAL_FLAGS,
    VLLM,
    VLLM_FLAGS,
    asking_for,
    draw_hybrid_flags,
    draw_sampling,
    draw_vllm_workers,
    recorded,
)
from tests.chaos.stage import Cast, Outcome, Stage
from tests.service.fake_model import byte_tokenizer, expected_tokens, expected_under

#: Of so many schedules one is played by real workers with the embedded model.
REAL_EVERY = 10

LEASE_SECONDS, REAL_LEASE_SECONDS = 1.0, 2.0
FAKE_FLAGS = (
    *("--block-seconds", "0.05", "--drain-seconds", "0.2", "--claim-batch", "3"),
    *("--max-num-seqs", "5", "--num-blocks", "72", "--num-host-blocks", "24"),
    *("--check-invariants", "--served-model-name", "fake"),
)
#: Of every other schedule: whether tokens are guessed must not show, not in a takeover either.
GUESSES = ("--num-speculative-tokens", "4")
#: What some outputs have to be; long, so that what goes wrong finds most of them half-way.
CONSTRAINTS: tuple[tuple[Kind, Any], ...] = (
    ("regex", "([a-f]{4},){40}"),
    ("regex", "[^a]{3}[é-ü]{60}"),
    ("choice", ["a" * 50, "a" * 50 + "b" * 70, "c" * 90]),
    ("grammar", 'start: ("<" WORD ">")~20\nWORD: /[a-z]{3,6}/'),
    (
        "json_schema",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 20, "maxLength": 60},
                "codes": {"type": "array", "items": {"type": "integer"}, "minItems": 10},
            },
            "required": ["name", "codes"],
            "additionalProperties": False,
        },
    ),
    ("json_object", True),
)
#: How many are constrained.
CONSTRAINED_SHARE = 0.3
#: How many are from an adapter, half of them asked for in OpenAI's way.
ADAPTED_SHARE = 0.4
#: How many schedules have a session, and how many of their requests are its turns.
SESSIONS_SHARE, TURNS_SHARE = 0.5, 0.4
#: Transitions whose reply may be lost on the way.
LOSABLE = ("submit", "claim", "commit", "extend", "extend", "heartbeat", "release", "reap")
#: The most that a crash of Redis takes from its log; a schedule writes some hundred thousand bytes.
MOST_LOST_BYTES = 12_000


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` names a method of `_Play`; `share` of all tokens has been seen when it strikes."""

    kind: str
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed says."""

    seed: int
    cast: Cast
    num_workers: int
    wanted: tuple[Wanted, ...]
    faults: tuple[Fault, ...]
    #: The last request is submitted right before the first crash of Redis, which forgets that.
    has_latecomer: bool


#: What may go wrong, and how often against the others.
FAULTS = {
    "kill": 4,
    "kill_client": 3,
    "pause": 3,
    "lose_replies": 4,
    "crash_redis": 3,
    "stall_redis": 1,
    "black_out": 1,
    "drain": 2,
    "cancel": 2,
    "submit_again": 2,
}
NUM_FAULTS = (4, 9)
#: How many schedules have their streams trimmed or deleted once, too.
TRIMMED_SHARE = 0.3


def is_real(seed: int) -> bool:
    """Whether its workers have the embedded model, if no engine is named."""
    return seed % REAL_EVERY == REAL_EVERY - 1


def draw_plan(seed: int, engine: str = "") -> Plan:
    """The plan of a seed: always the same.

    With the engine `vllm`, some workers or all have it; with `hybrid`, all have the hybrid model.
    """
    random_, has_model = random.Random(seed), bool(engine) or is_real(seed)
    real_flags = draw_hybrid_flags(seed) if engine == HYBRID else REAL_FLAGS
    kinds = random_.choices(
        list(FAULTS), weights=list(FAULTS.values()), k=random_.randint(*NUM_FAULTS)
    )
    # Apart from the other draws, as constraints are.
    apart = random.Random(f"trimming {seed}")
    if apart.random() < TRIMMED_SHARE:
        kinds.insert(apart.randrange(len(kinds) + 1), "trim")
    # Few attempts make dead letters; many let all that can be completed be completed.
    cast = Cast(
        flags=(real_flags if has_model else FAKE_FLAGS) + GUESSES * (seed % 2),
        lease_seconds=REAL_LEASE_SECONDS if has_model else LEASE_SECONDS,
        max_attempts=2 if random_.random() < 0.15 else 20,
        step_seconds=None if has_model else random_.choice((0.002, 0.004, 0.008)),
        vllm_flags=VLLM_FLAGS if engine == VLLM else (),
        vllm_workers=draw_vllm_workers(seed) if engine == VLLM else (),
        is_hybrid=engine == HYBRID,
    )
    wanted = _draw_real(random_, seed, engine) if has_model else _draw_fake(random_, seed=seed)
    return Plan(
        seed=seed,
        cast=cast,
        num_workers=2 if has_model else random_.randint(2, 3),
        wanted=wanted,
        faults=tuple(
            Fault(kind, share)
            for kind, share in zip(kinds, sorted(random_.random() for _ in kinds), strict=True)
        ),
        # Apart from the other draws, as constraints are.
        has_latecomer="crash_redis" in kinds and random.Random(f"latecomer {seed}").random() < 0.5,
    )


def play(plan: Plan) -> Outcome:
    """Plays a plan to its end. Stuck when something that had to come never came."""
    with Stage(plan.cast, plan.wanted) as stage:
        _Play(plan, stage).run()
        return stage.outcome


class _Play:
    """One performance. Every fault leaves at least one worker that can go on."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._plan = plan
        self._stage = stage
        # Apart from the plan's own draws, so that a longer plan does not change the victims.
        self._random = random.Random(f"{plan.seed} victims")
        self._num_tokens = sum(len(item.tokens) for item in plan.wanted)
        #: Callers that are not there from the beginning.
        self._late = stage.callers[-1:] if plan.has_latecomer else []

    def run(self) -> None:
        stage = self._stage
        for _ in range(self._plan.num_workers):
            stage.start_worker()
        stage.start_clients(stage.callers[: len(stage.callers) - len(self._late)])
        for fault in self._plan.faults:
            due = int(fault.share * self._num_tokens)
            stage.until(lambda due=due: stage.num_tokens >= due or stage.has_ended, "progress")
            strike: Callable[[], None] = getattr(self, f"_{fault.kind}")
            strike()
            stage.outcome.figures[f"fault_{fault.kind}"] += 1
        stage.finish()

    def _kill(self) -> None:
        self._stage.wait_for_workers()
        self._stage.kill_worker(self._random.choice(self._stage.active))
        self._stage.start_worker()

    def _kill_client(self) -> None:
        self._stage.kill_client(self._random.choice(self._stage.clients))

    def _pause(self) -> None:
        """Stops a worker past its lease; half the time it sleeps through the next faults, too."""
        stage = self._stage
        stage.resume_all()
        if len(stage.active) < 2:
            stage.start_worker()
        stage.wait_for_workers()
        sleeper = self._random.choice(stage.active)
        stage.pause(sleeper)
        if self._random.random() < 0.5:
            sleeper.resume()

    def _drain(self) -> None:
        """Asks a worker to end while another comes; now and then one that has only just begun."""
        stage = self._stage
        if self._random.random() < 0.75:
            stage.wait_for_workers()
            leaver = self._random.choice(stage.active)
            stage.start_worker()
        else:
            leaver = stage.start_worker()
        stage.drain_worker(leaver)

    def _lose_replies(self) -> None:
        """Cuts the connection in place of replies, after the server has done what was asked."""
        stage = self._stage
        for _ in range(self._random.randint(1, 4)):
            name = self._random.choice((*LOSABLE, "XREADGROUP", "XREAD"))
            stage.wire.lose_reply(name if name.isupper() else script_sha(load_source(name)))

    def _crash_redis(self) -> None:
        """Redis dies and loses its tail, and with that a submit it has just answered, or not."""
        stage, late, self._late = self._stage, self._late, []
        before = stage.log_size
        stage.start_clients(late)
        stage.until(lambda: all(caller.notes.is_submitted for caller in late), "a late submit")
        stage.crash_redis((lambda _: before) if late else self._keep)

    def _stall_redis(self) -> None:
        self._stage.stall_redis(self._plan.cast.lease_seconds * self._random.uniform(0.5, 1.5))

    def _black_out(self) -> None:
        """Everything dies at once: workers, clients, Redis, and what Redis had not on disk."""
        stage = self._stage
        stage.resume_all()
        stage.wait_for_workers()
        victims = stage.active
        for worker in victims:
            stage.kill_worker(worker)
        stage.crash_redis(self._keep)
        for client in list(stage.clients):
            stage.kill_client(client)
        for _ in victims:
            stage.start_worker()

    def _keep(self, size: int) -> int:
        """How much of its log a crash leaves to Redis."""
        return size - self._random.randrange(0, min(MOST_LOST_BYTES, size // 2) + 1)

    def _trim(self) -> None:
        self._stage.trim(is_deletion=self._random.random() < 0.5)

    def _cancel(self) -> None:
        # Redis may have lost the submit, or its caller has not come to say it yet.
        with contextlib.suppress(UnknownRequest):
            self._stage.cancel(self._random.choice(self._stage.callers), self._stage.broker)

    def _submit_again(self) -> None:
        caller = self._random.choice(self._stage.callers)
        if caller.notes.is_submitted:
            self._stage.submit_again(caller, self._stage.broker)


def _draw_fake(random_: random.Random, *, seed: int) -> tuple[Wanted, ...]:
    wanted = []
    shared = [random_.randrange(1, 257) for _ in range(24)]
    for index in range(random_.randint(8, 14)):
        own = [random_.randrange(1, 257) for _ in range(random_.randint(1, 40))]
        prompt = (shared if random_.random() < 0.4 else []) + own
        max_tokens = random_.choice((1, 7, 40, 120, 200, 320))
        sampling = draw_sampling(random_)
        constraint, adapter = _draw_constraint(seed, index), _draw_adapter(seed, index)
        request = GenerationRequest(
            id=f"s{seed}-{index}",
            kind="tokens",
            priority=random_.choice(list(Priority)),
            body={
                "prompt": prompt,
                "max_tokens": max_tokens,
                **sampling,
                **constraint,
                **asking_for(adapter, model="fake", in_model=index % 2 == 1),
            },
            session_id=_draw_session(seed, index),
            # A plan is drawn from its seed alone, and never from the clock.
            created_ms=0,
        )
        size = {"max_tokens": max_tokens, "seed": sampling["seed"]}
        tokens = tokens_under(constraint, prompt, adapter=adapter, **size)
        departures = draw_departures(random_, num_tokens=max_tokens)
        wanted.append(Wanted(request, tokens, text_after(prompt, tokens), departures))
    return tuple(wanted)


def _draw_constraint(seed: int, index: int) -> dict[Kind, Any]:
    """What the output of a request has to be, as its body says it; empty for most."""
    # Apart from the plan's other draws, which stay what they were before there were any.
    random_ = random.Random(f"constraint {seed} {index}")
    return dict([random_.choice(CONSTRAINTS)]) if random_.random() < CONSTRAINED_SHARE else {}


def _draw_adapter(seed: int, index: int) -> str | None:
    """The adapter that a request names; none for most."""
    random_ = random.Random(f"adapter {seed} {index}")
    return random_.choice(NAMES) if random_.random() < ADAPTED_SHARE else None


def _draw_session(seed: int, index: int) -> str | None:
    """The session of which a request is a turn; none for most."""
    has_session = random.Random(f"session {seed}").random() < SESSIONS_SHARE
    is_turn = random.Random(f"turn {seed} {index}").random() < TURNS_SHARE
    return "talk" if has_session and is_turn else None


def tokens_under(
    constraint: Mapping[Kind, Any],
    prompt: Sequence[int],
    *,
    max_tokens: int,
    seed: int,
    adapter: str | None = None,
) -> tuple[int, ...]:
    """What comes after this prompt when nothing goes wrong, and has to be as the body says."""
    for kind, value in constraint.items():
        wanted = Constraint(kind, value, f"body.{kind}")
        return expected_under(wanted, prompt, max_tokens=max_tokens, seed=seed, adapter=adapter)
    return expected_tokens(prompt, max_tokens=max_tokens, seed=seed, adapter=adapter)


def text_after(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What the tokens say after this prompt when they come one by one and nothing goes wrong."""
    decoder = StreamDecoder(byte_tokenizer(), skip_special_tokens=True, prompt=prompt)
    return "".join(decoder.step(token) or "" for token in tokens) + decoder.rest()


def _draw_real(random_: random.Random, seed: int, engine: str) -> tuple[Wanted, ...]:
    """A choice of the recorded requests under new names."""
    chosen = random_.sample(recorded(engine), k=6)
    return tuple(
        Wanted(
            item.request.model_copy(
                update={
                    "id": f"s{seed}-{index}",
                    "priority": random_.choice(list(Priority)),
                }
            ),
            item.tokens,
            item.text,
            draw_departures(random_, num_tokens=len(item.tokens)),
        )
        for index, item in enumerate(chosen)
    )
