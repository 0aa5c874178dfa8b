"""Plays with a real model: flags of the workers, requests, and what an undisturbed run says.

The undisturbed run is one native worker, also where workers of vLLM are to say the same.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from quire import Client
from quire.wire.protocol import GenerationRequest
from service.worker.settings.config import EMBEDDED_MODEL
from tests.chaos.adapters import NAMES
from tests.chaos.callers import Wanted
from tests.chaos.hybrid import HYBRID
from tests.chaos.stage import QUEUE, Cast, Stage

#: The name of the engine in commands.
VLLM = "vllm"
_COMMON = ("--block-seconds", "0.05", "--drain-seconds", "0.2", "--claim-batch", "3")
_SIZES = ("--max-num-seqs", "4", "--dtype", "float32")
REAL_FLAGS = (*_COMMON, *_SIZES, "--num-blocks", "128", "--device", "cpu")
#: A small cache, so that requests wait and preempt. On a CPU vLLM prefers blocks of 32 tokens.
VLLM_FLAGS = (
    *_COMMON,
    *_SIZES,
    *("--engine", VLLM, "--kv-cache-memory-bytes", str(4 << 20), "--check-invariants"),
    *("--vllm", "enforce_eager=true", "--vllm", "block_size=32"),
)
#: A small cache, so that requests preempt, and a request that is taken over is computed in chunks.
HYBRID_FLAGS = (
    *REAL_FLAGS,
    *("--num-blocks", "28", "--max-num-batched-tokens", "32", "--check-invariants"),
)
#: What a schedule does with the KV and the state of a preempted request.
PREEMPTION_MODES = (
    ("--preemption-mode", "recompute"),
    ("--preemption-mode", "swap", "--num-host-blocks", "28"),
)
#: Of schedules with vLLM: every so many have no other workers.
ALL_VLLM_EVERY = 3
#: Workers for which an engine is drawn; more begin from the start.
NUM_DRAWN_WORKERS = 12
#: What some outputs of schedules with vLLM have to be.
PATTERNS = ("[a-z ]{60,200}", "([0-9]{3}-){30,60}", "[^a]{100,200}")


def draw_vllm_workers(seed: int) -> tuple[bool, ...]:
    """Which workers of a schedule have vLLM, in the order of their starts; the first one has."""
    random_ = random.Random(f"engines {seed}")
    if seed % ALL_VLLM_EVERY == 0:
        return (True,) * NUM_DRAWN_WORKERS
    return (True, *(random_.random() < 0.5 for _ in range(NUM_DRAWN_WORKERS - 1)))


def draw_hybrid_flags(seed: int) -> tuple[str, ...]:
    """The flags of a schedule's workers with the hybrid model."""
    # Apart from the other draws, so that a seed means the same faults with every model.
    return (*HYBRID_FLAGS, *random.Random(f"preemption {seed}").choice(PREEMPTION_MODES))


def draw_sampling(random_: random.Random) -> dict[str, Any]:
    """Greedy, or seeded noise."""
    temperature = random_.choice((0.0, 0.0, 0.8, 1.3))
    return {"temperature": temperature, "seed": random_.randrange(1 << 31)}


def asking_for(adapter: str | None, *, model: str, in_model: bool) -> dict[str, str]:
    """The fields of a body that ask for an adapter of this model."""
    if adapter is None:
        return {}
    return {"model": f"{model}:{adapter}"} if in_model else {"adapter": adapter}


@cache
def recorded(engine: str = "") -> tuple[Wanted, ...]:
    """Requests with what one worker, left in peace, makes of them: the oracle of the real model."""
    random_ = random.Random("recorded")
    model = HYBRID if engine == HYBRID else EMBEDDED_MODEL.name
    requests = [
        GenerationRequest(
            id=f"recorded-{index}",
            kind="completions",
            body={
                "prompt": f"{random_.randrange(10, 99)}+{random_.randrange(10, 99)}=",
                "max_tokens": random_.choice((30, 150, 300)),
                "ignore_eos": True,
                **draw_sampling(random_),
                **asking_for((None, *NAMES)[index % 3], model=model, in_model=index % 2 == 1),
            },
        )
        for index in range(10)
    ]
    if engine == VLLM:
        requests += _more_requests(random_)
    return undisturbed(requests, engine)


def _more_requests(random_: random.Random) -> list[GenerationRequest]:
    """Constraints, log-probabilities and penalties, with which engines could differ."""
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 250, "temperature": 1.2, "regex": pattern} for pattern in PATTERNS
    ]
    bodies += [
        {"max_tokens": 200, "ignore_eos": True, "temperature": 1.1, "top_p": 0.9, "logprobs": 2},
        {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "frequency_penalty": 0.2},
        {"max_tokens": 200, "ignore_eos": True, "temperature": 1.3, "top_k": 20, "min_tokens": 50},
    ]
    return [
        GenerationRequest(
            id=f"recorded-more-{index}",
            kind="completions",
            body={"prompt": "count: 100 to 400=", "seed": random_.randrange(1 << 31), **body},
        )
        for index, body in enumerate(bodies)
    ]


def undisturbed(requests: Sequence[GenerationRequest], engine: str) -> tuple[Wanted, ...]:
    """What one native worker, left in peace, makes of these requests."""
    empty = tuple(Wanted(request, (), "", ()) for request in requests)
    is_hybrid = engine == HYBRID
    cast = Cast(REAL_FLAGS, 30.0, max_attempts=1, step_seconds=None, is_hybrid=is_hybrid)
    with Stage(cast, empty) as stage:
        stage.start_worker()
        stage.broker.submit_many(requests)
        results = [_result(stage, request.id) for request in requests]
    return tuple(
        Wanted(request, tokens, text, ())
        for request, (tokens, text) in zip(requests, results, strict=True)
    )


def _result(stage: Stage, request_id: str) -> tuple[tuple[int, ...], str]:
    with Client(stage.server.url, queue=QUEUE) as client:
        completion = client.result(request_id, timeout=300.0)
    return completion.token_ids, completion.text
