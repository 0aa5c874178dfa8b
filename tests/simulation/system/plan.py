"""What a schedule is made of, drawn from its seed: its requests, its fleet, what befalls them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.records import PromptToken
from quire.wire.constraints import Constraint
from quire.wire.logprobs import TokenLogprob
from quire.wire.protocol import GenerationRequest
from tests.service.fake_model import (
    byte_tokenizer,
    expected_logprobs,
    expected_prompt_tokens,
    expected_tokens,
    expected_under,
    text_of,
)

#: Disturbances end at this moment at the latest; from then on everything must come to its end.
HORIZON_SECONDS = 3.5

#: All requests are in the queue by then.
LATEST_SUBMIT_SECONDS = 1.0

LEASE_SECONDS = 1.5

#: Ids of tokens that are printable characters of one byte.
PRINTABLE_IDS = range(1, 95)

#: What some outputs have to match from end to end; nothing that does could be longer.
PATTERNS = ("[0-9]{6}", "([a-f]{4},){7}", "(yes|no)!", "[^a]{3}[é-ü]{12}")

#: What every worker has; about a third of all requests are from one of them.
ADAPTERS = ("first", "second")

#: The sessions of a tenant; in one schedule in two, most requests are turns of one.
SESSIONS = ("chat", "chat", "other-chat")

#: How often a plague comes.
PLAGUE_FAULTS = 8

#: What may befall a schedule, with how often it is drawn.
FAULTS = {
    "kill a worker": 5,
    "freeze a worker": 5,
    "cut a worker off": 3,
    "drain a worker": 3,
    "fail a device": 1,
    "crash Redis": 1,
    "lose the tail": 4,
    "kill a caller": 3,
    "cancel": 2,
    "submit again": 2,
    "pause the queue": 1,
    "requeue the dead": 1,
}

#: What else may befall one schedule in five, drawn apart from the rest: the server loses a part of
#: the queue.
LOSSES = ("trim the streams", "lose the ranks", "lose the queue")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, when it is submitted, and what comes of it when nothing goes wrong."""

    request: GenerationRequest
    submit_at: float
    #: Seconds from the submit, None for none.
    deadline: float | None
    delay: float | None
    tokens: tuple[int, ...]
    text: str
    #: What is said of the tokens; empty if the request does not ask.
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: tuple[PromptToken, ...]
    finish_reason: str
    is_poison: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens at a moment; `amount` is its size between 0 and 1."""

    moment: float
    kind: str
    amount: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole schedule before it is played."""

    seed: int
    num_workers: int
    max_attempts: int
    step_seconds: float
    wanted: tuple[Wanted, ...]
    faults: tuple[Fault, ...]
    weather: dict[str, float]
    settings: dict[str, Any]
    #: Whether the tenants take turns by tokens.
    is_shared: bool = False


def draw_plan(seed: int, *, plague: str = "") -> Plan:
    """The plan of a seed: a pure function of it. A `plague` is a fault that comes often."""
    draw = random.Random(f"plan {seed}")
    wanted = tuple(_draw_wanted(draw, seed, number) for number in range(draw.randint(2, 5)))
    if draw.random() < 0.15:
        wanted = (*wanted[:-1], _poisoned(wanted[-1]))
    kinds = draw.choices(list(FAULTS), list(FAULTS.values()), k=draw.randint(3, 12))
    kinds += [plague] * PLAGUE_FAULTS if plague in FAULTS else []
    # Most while most is going on.
    moments = [draw.triangular(0, HORIZON_SECONDS, 0.5) for _ in kinds]
    faults = [
        Fault(moment, kind, draw.random()) for moment, kind in zip(moments, kinds, strict=True)
    ]
    faults += _losses(seed, plague=plague)
    weather = draw.choice(
        [
            {},
            {"reply_lost": 0.02, "is_slow": 0.02},
            {"request_lost": 0.01, "reply_lost": 0.03, "arrives_late": 0.03},
            {"request_lost": 0.05, "reply_lost": 0.1, "arrives_late": 0.05, "is_slow": 0.1},
        ]
    )
    return Plan(
        seed=seed,
        num_workers=draw.randint(1, 3),
        max_attempts=draw.choice([2, 5, 20, 20]),
        step_seconds=draw.choice([0.02, 0.1, 0.2]),
        wanted=wanted,
        faults=tuple(sorted(faults, key=lambda fault: fault.moment)),
        weather=weather,
        settings={
            "block_size": 4,
            "num_blocks": draw.choice([16, 64]),
            "num_host_blocks": draw.choice([0, 8]),
            "max_num_seqs": draw.choice([1, 2, 4]),
            "max_num_batched_tokens": draw.choice([8, 64]),
            "claim_batch": draw.choice([1, 4]),
            "policy": draw.choice(["fcfs", "sjf", "priority", "adaptive"]),
            "preemption_mode": draw.choice(["recompute", "swap", "auto"]),
            "max_prefill_tokens": draw.choice([0, 0, 3]),
            "batch_mode": draw.choice(["mixed", "mixed", "prefer-decode", "prefer-prefill"]),
            "dynamic_batching": draw.choice([True, True, True, False]),
            "drain_seconds": draw.choice([0.0, 0.5, 10.0]),
            "publish_interval_seconds": draw.choice([0.0, 0.0, 0.1]),
            "num_speculative_tokens": draw.choice([0, 1, 5]),
            # Apart from the other draws, as the losses.
            "session_affinity_seconds": random.Random(f"affinity {seed}").choice([0.0, 0.2, 1.0]),
        },
        # Apart from the other draws, as the losses.
        is_shared=random.Random(f"sharing {seed}").random() < 0.5,
    )


def _losses(seed: int, *, plague: str) -> list[Fault]:
    """Apart from the other draws, so that older schedules keep the rest of what they were."""
    draw = random.Random(f"losses {seed}")
    kinds = draw.choices(LOSSES, k=draw.randint(1, 3)) if draw.random() < 0.2 else []
    kinds += [plague] * PLAGUE_FAULTS if plague in LOSSES else []
    return [Fault(draw.uniform(0, HORIZON_SECONDS), kind, draw.random()) for kind in kinds]


def _draw_wanted(draw: random.Random, seed: int, number: int) -> Wanted:
    prompt: list[int] | str
    prompt = draw.choices(PRINTABLE_IDS, k=draw.randint(1, 12))
    prompt_ids: Sequence[int] = prompt
    kind = draw.choice(["tokens", "tokens", "completions"])
    if kind == "completions":
        prompt = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 12)))
        prompt_ids = byte_tokenizer().encode(prompt).ids
    sampling: dict[str, Any] = {
        "max_tokens": draw.choice([1, 8, 24, 40]),
        "seed": draw.getrandbits(31),
    }
    honest = expected_tokens(prompt_ids, max_tokens=sampling["max_tokens"], seed=sampling["seed"])
    adapter, ends = None, draw.random()
    if ends < 0.2:
        stop = draw.choice(honest)
        sampling["stop_token_ids"] = [stop]
        tokens, reason = honest[: honest.index(stop) + 1], "stop"
        text = text_of(tokens)
    elif ends < 0.4 and (found := _stop_string(draw, honest)):
        sampling["stop"] = [found[0]]
        tokens, text, reason = found[1], found[2], "stop"
    else:
        adapter, tokens, text, reason = _drawn_apart(f"{seed} {number}", prompt_ids, sampling)
    number_of_best = random.Random(f"logprobs {seed} {number}").choice([None, None, 0, 2])
    logprobs: tuple[TokenLogprob, ...] = ()
    if number_of_best is not None:
        sampling["logprobs"] = number_of_best
        logprobs = expected_logprobs(tokens, number=number_of_best)
    of_prompt = random.Random(f"prompt logprobs {seed} {number}").choice([None, None, 0, 2])
    prompt_tokens: tuple[PromptToken, ...] = ()
    if of_prompt is not None:
        sampling["prompt_logprobs"] = of_prompt
        prompt_tokens = expected_prompt_tokens(prompt_ids, number=of_prompt)
    group = f"group{seed % 7}~" if draw.random() < 0.3 else ""
    request = GenerationRequest(
        id=f"{group}r{number}",
        kind=kind,
        body={"prompt": prompt, "adapter": adapter} | sampling,
        priority=draw.choice([0, 1, 1, 2, 3]),
        tenant=draw.choice(["default", "other"]),
        metadata=draw.choice([{}, {"row": number}]),
        idempotency_key=draw.choice([None, None, f"key{number}"]),
        session_id=_session_of(seed, number),
        created_ms=0,
    )
    return Wanted(
        request=request,
        submit_at=draw.uniform(0, LATEST_SUBMIT_SECONDS) if number else 0.0,
        deadline=draw.uniform(0.05, 4.0) if draw.random() < 0.15 else None,
        delay=draw.uniform(0.1, 2.0) if draw.random() < 0.15 else None,
        tokens=tokens,
        text=text,
        logprobs=logprobs,
        prompt_tokens=prompt_tokens,
        finish_reason=reason,
        is_poison=False,
    )


def _session_of(seed: int, number: int) -> str | None:
    """Apart from the other draws, as the losses."""
    if random.Random(f"sessions {seed}").random() < 0.5:
        return None
    return random.Random(f"session {seed} {number}").choice([*SESSIONS, None])


def _drawn_apart(
    name: str, prompt_ids: Sequence[int], sampling: dict[str, Any]
) -> tuple[str | None, tuple[int, ...], str, str]:
    """The adapter of a request, its tokens, their text and why they end; perhaps by a constraint.

    Apart from the other draws, as is what follows it, so that older schedules keep the rest of what
    they were.
    """
    adapter = random.Random(f"adapter {name}").choice([None, None, *ADAPTERS])
    asked, drawn = random.Random(f"constraint {name}"), {"adapter": adapter, **sampling}
    if asked.random() >= 0.3:
        tokens = expected_tokens(prompt_ids, **drawn)
        return adapter, tokens, text_of(tokens), "length"
    sampling["regex"] = asked.choice(PATTERNS)
    tokens = expected_under(
        Constraint("regex", sampling["regex"], "body.regex"), prompt_ids, **drawn
    )
    text = text_of(tokens)
    is_complete = re.fullmatch(sampling["regex"], text) is not None
    return adapter, tokens, text, "stop" if is_complete else "length"


def _stop_string(
    draw: random.Random, honest: tuple[int, ...]
) -> tuple[str, tuple[int, ...], str] | None:
    """A character of the output as a stop string: it, the tokens up to it, and the text before."""
    printable = [token for token in honest if token in PRINTABLE_IDS]
    if not printable:
        return None
    chosen = draw.choice(printable)
    tokens = honest[: honest.index(chosen) + 1]
    text = text_of(tokens)
    # A broken character before it may have swallowed it.
    return (text[-1], tokens, text[:-1]) if text.count(text_of([chosen])) == 1 else None


def _poisoned(wanted: Wanted) -> Wanted:
    return Wanted(
        **{name: getattr(wanted, name) for name in Wanted.__slots__} | {"is_poison": True}
    )
