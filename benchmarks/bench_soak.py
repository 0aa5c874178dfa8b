"""Memory over 100,000 requests: the engine on its fake runner, with aborts and preemptions.

    python -m benchmarks.bench_soak [--requests 100000] [--seed 1] [--json FILE]

Prompts of mixed lengths share prefixes, some requests arrive with published tokens, and some are
aborted in any state. The pool is so small that others are preempted, by swap and by recompute. The
resident size is printed after each tenth of the requests.

The gate:

- Each output equals what its request generates alone, or is a prefix of that if it was aborted.
- The invariants of the engine hold after each tenth.
- Aborts, both kinds of preemption and cache hits did happen.
- In the last half the process grew by less than a bound, which a leak of one dictionary entry per
  request would exceed.
"""

import argparse
import gc
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.common.figures import machine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake_runner import FakeRunner, fake_generation
from engine.port import RequestOutput
from engine.request import FinishReason, Priority, Request
from engine.sampling_params import SamplingParams
from quire.cli.usage import positive

#: The allowed growth of the process in the last half: the larger of a fixed size and a size per
#: request.
MAX_GROWTH_BYTES = 1 << 20
MAX_GROWTH_BYTES_PER_REQUEST = 64

#: Requests in the engine at once, running and waiting.
MAX_ALIVE = 96
NUM_SHARED_PROMPTS = 24
MAX_SHARED_TOKENS = 48
MAX_OWN_TOKENS = 24
MAX_OUTPUT_TOKENS = 24
#: The share of requests that are aborted, and of those that arrive with published tokens.
ABORTED_SHARE = 0.05
RESUMED_SHARE = 0.1
#: The most steps from the start of a request to its abort.
MAX_STEPS_TO_ABORT = 40

CONFIG = EngineConfig(
    num_blocks=96,
    block_size=8,
    num_host_blocks=32,
    max_model_len=128,
    vocab_size=512,
    eos_token_ids=frozenset({0}),
    max_num_seqs=24,
    max_num_batched_tokens=256,
    policy="adaptive",
    aging_seconds=20.0,
    block_copy_seconds=1e-5,
)


class SoakFailed(Exception):
    """The gate has failed; the message says why."""


@dataclass(slots=True)
class Soaked:
    """One request in the engine, and the output that it must generate."""

    request: Request
    expected: list[int]
    #: Tokens published so far, the resumed ones included.
    published: list[int]
    abort_at_step: int | None


def make_request(index: int, seed: int, now: float) -> Soaked:
    """Request number `index` of a soak: a pure function of the seed and the index."""
    draw = random.Random(f"{seed}-{index}")
    shared = random.Random(f"{seed}-shared-{draw.randrange(NUM_SHARED_PROMPTS)}")
    prompt = [shared.randrange(1, CONFIG.vocab_size) for _ in range(MAX_SHARED_TOKENS)]
    prompt = prompt[: draw.randint(0, MAX_SHARED_TOKENS)]
    prompt += [draw.randrange(1, CONFIG.vocab_size) for _ in range(draw.randint(1, MAX_OWN_TOKENS))]
    max_tokens = draw.randint(1, MAX_OUTPUT_TOKENS)
    sampling = SamplingParams(max_tokens=max_tokens, seed=draw.randrange(1 << 32))
    expected = fake_generation(
        prompt, num_tokens=max_tokens, seed=sampling.seed, vocab_size=CONFIG.vocab_size
    )
    is_resumed = draw.random() < RESUMED_SHARE
    published = expected[: draw.randint(1, max_tokens)] if is_resumed else []
    is_aborted = draw.random() < ABORTED_SHARE
    request = Request(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling=sampling,
        arrival_time=now,
        priority=draw.choice(list(Priority)),
        output_token_ids=list(published),
    )
    abort_at_step = int(now) + draw.randint(0, MAX_STEPS_TO_ABORT) if is_aborted else None
    return Soaked(request, expected, published, abort_at_step)


def ticking(start: int) -> Callable[[], float]:
    """A clock for one step, which moves a little with each reading: so steps take time."""
    readings = count()
    return lambda: start + next(readings) / 1024


@dataclass(slots=True)
class Soak:
    """Keeps an engine full until all requests have ended; each step is a second of its clock."""

    num_requests: int
    seed: int
    num_added: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    step: int = 0
    alive: dict[str, Soaked] = field(default_factory=dict)
    runner: FakeRunner = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(
            num_blocks=CONFIG.num_blocks,
            num_host_blocks=CONFIG.num_host_blocks,
            block_size=CONFIG.block_size,
            vocab_size=CONFIG.vocab_size,
        )
        self.engine = Engine(CONFIG, self.runner)

    def run(self) -> Iterator[int]:
        """Run to the end; yields the number of ended requests after each tenth."""
        next_stop = self.num_requests // 10
        while self.num_added < self.num_requests or self.engine.has_work():
            self._fill()
            self._abort_some()
            self.step += 1
            for output in self.engine.step(ticking(self.step)):
                self._take(output)
            while next_stop <= self.num_finished and next_stop <= self.num_requests:
                yield next_stop
                next_stop += max(1, self.num_requests // 10)
        if self.alive:
            raise SoakFailed(f"{len(self.alive)} requests never ended")

    def _fill(self) -> None:
        while self.num_added < self.num_requests and len(self.alive) < MAX_ALIVE:
            soaked = make_request(self.num_added, self.seed, float(self.step))
            self.alive[soaked.request.request_id] = soaked
            self.engine.add_request(soaked.request)
            self.num_added += 1

    def _abort_some(self) -> None:
        for request_id, soaked in self.alive.items():
            if soaked.abort_at_step == self.step:
                self.engine.abort(request_id)

    def _take(self, output: RequestOutput) -> None:
        soaked = self.alive[output.request_id]
        if output.start != len(soaked.published):
            raise SoakFailed(f"{output.request_id}: token {output.start} came out of turn")
        soaked.published += output.token_ids
        if output.finish_reason is None:
            return
        del self.alive[output.request_id]
        self.num_finished += 1
        expected = soaked.expected
        if output.finish_reason is FinishReason.CANCELLED:
            self.num_aborted += 1
            expected = expected[: len(soaked.published)]
        if soaked.published != expected:
            raise SoakFailed(f"{output.request_id}: wrong tokens, {output.finish_reason}")


def resident_bytes() -> int:
    """The resident size of this process, after a full garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(num_requests: int, seed: int) -> dict[str, Any]:
    """Run one soak and return its record.

    Raises:
        SoakFailed: it has failed the gate.
    """
    one = Soak(num_requests, seed)
    sizes: list[int] = []
    started = time.perf_counter()
    for num_ended in one.run():
        if broken := one.engine.violations():
            raise SoakFailed(f"laws broken after {num_ended} requests: {broken}")
        sizes.append(resident_bytes())
        print(f"{num_ended:>8} requests {sizes[-1] / 2**20:>8.1f} MiB", flush=True)
    seen = one.engine.snapshot()
    happened = {
        "aborts": one.num_aborted,
        "preemptions_swap": seen.preemptions_swap,
        "preemptions_recompute": seen.preemptions_recompute,
        "cached_prompt_tokens": seen.cached_prompt_tokens,
    }
    if missing := [name for name, times in happened.items() if not times]:
        raise SoakFailed(f"never happened, so never soaked: {', '.join(missing)}")
    return {
        "requests": num_requests,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        "steps": seen.steps,
        "generated_tokens": seen.generated_tokens,
        **happened,
        "resident_bytes_at_tenths": sizes,
        "growth_of_last_half_bytes": growth_of_last_half(sizes, num_requests),
    }


def growth_of_last_half(sizes: Sequence[int], num_requests: int) -> int:
    """Bytes by which the process grew from the fifth tenth to the tenth.

    Raises:
        SoakFailed: it grew by more than the noise of the allocator.
    """
    growth = sizes[-1] - sizes[len(sizes) // 2 - 1]
    allowed = max(MAX_GROWTH_BYTES, MAX_GROWTH_BYTES_PER_REQUEST * num_requests // 2)
    if growth > allowed:
        raise SoakFailed(f"grew by {growth} bytes in the last half, and {allowed} are allowed")
    return growth


def run_command(
    soak: Callable[[int, int], dict[str, Any]], *, description: str, num_requests: int
) -> None:
    """The command of a soak: reads the flags, prints the figures, exits with 1 if the gate fails.

    `soak` takes the number of requests, by default `num_requests`, and a seed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--requests", type=positive, default=num_requests)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    try:
        record = soak(arguments.requests, arguments.seed)
    except SoakFailed as failure:
        raise SystemExit(f"soak failed: {failure}") from failure
    print(", ".join(f"{name} {value}" for name, value in record.items() if name != "seed"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine()} | record, indent=2) + "\n")


if __name__ == "__main__":
    run_command(soak, description=__doc__.splitlines()[0], num_requests=100_000)
