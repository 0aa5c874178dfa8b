"""Memory over 20,000 requests through Redis and a worker process: nothing grows, nothing is wrong.

    python -m benchmarks.bench_service_soak [--requests 20000] [--seed 1] [--json FILE]

This process is producer and reader. The worker serves the model abacus with so few blocks that half
of the requests are preempted. Prompts repeat, and some requests are cancelled. After each tenth of
the requests the queue is empty, and the run waits until the keys of ended requests have expired.
Then it reads the worker's resident size, the memory of Redis and the number of its keys.

The gate:

- Each output equals, token for token, what the engine generates for its prompt alone, or is a
  prefix of that if it was cancelled.
- When the queue is empty, no key of a request is left, and the number of keys is the same each
  time.
- Preemptions, cancellations and cache hits did happen.
- In the last half neither process grew beyond the bounds of `benchmarks.bench_soak`.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from tokenizers import Tokenizer

from benchmarks.bench_service import worker
from benchmarks.bench_soak import SoakFailed, growth_of_last_half, run_command
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load.load_runner import load_runner
from engine.request import Request
from engine.sampling_params import SamplingParams
from models.abacus import tasks
from quire import Broker, Client, LocalRedis, connect
from quire.queue.publish.output_log import OutputRead

MODEL = Path(__file__).resolve().parent.parent / "models" / "abacus"
NUM_QUESTIONS = 400
MAX_TOKENS = 96
#: The most open requests, and the most in one submit.
MAX_OPEN = 256
SUBMITTED_AT_ONCE = 32
CANCELLED_SHARE = 0.05
#: How long Redis keeps ended requests, and the longest wait until their keys are gone.
RETENTION_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.1

WORKER_FLAGS = {
    "model": str(MODEL),
    "retention-seconds": str(RETENTION_SECONDS),
    "claim-batch": "64",
    "num-blocks": "96",
    "num-host-blocks": "32",
    "http-port": "0",
    "log-level": "warning",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what the engine generates for it alone."""

    prompt: str
    token_ids: list[int]
    text: str


@dataclass(slots=True)
class OpenRequest:
    """One open request, and the output that was read so far."""

    question: Question
    is_cancelled: bool
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


def questions(seed: int) -> list[Question]:
    """Different prompts of all tasks, each with its answer, which is computed alone."""
    runner = load_runner(MODEL, max_num_seqs=1, max_num_batched_tokens=512, num_blocks=64)
    facts = runner.config_facts
    config = EngineConfig(
        num_blocks=facts.num_blocks,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        block_size=facts.block_size,
    )
    engine, tokenizer = Engine(config, runner), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    draw = random.Random(seed)
    prompts = {
        tasks.generate(tasks.TASKS[index % len(tasks.TASKS)], draw).prompt
        for index in range(NUM_QUESTIONS)
    }
    found = []
    for prompt in sorted(prompts):
        request = Request(
            request_id=prompt,
            prompt_token_ids=tokenizer.encode(prompt).ids,
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            arrival_time=0.0,
        )
        engine.add_request(request)
        while engine.has_work():
            engine.step(time.perf_counter)
        ids = request.output_token_ids
        found.append(Question(prompt, ids, tokenizer.decode(ids)))
    return found


@dataclass(slots=True)
class ServiceSoak:
    """Keeps a queue full of questions, and reads and checks all answers."""

    client: Client
    broker: Broker
    questions: list[Question]
    draw: random.Random
    #: Counts of ends, tokens, preemptions and cache hits, by kind.
    seen: Counter[str] = field(default_factory=Counter)
    _open: dict[str, OpenRequest] = field(default_factory=dict)

    def run(self, count: int) -> None:
        """Submit `count` requests, read them to their ends, and check each output."""
        num_left = count
        while num_left or self._open:
            while num_left and len(self._open) <= MAX_OPEN - SUBMITTED_AT_ONCE:
                num_new = min(num_left, SUBMITTED_AT_ONCE)
                self._submit(num_new)
                num_left -= num_new
            pending = {name: len(one.token_ids) for name, one in self._open.items()}
            for name, output in self.broker.read_output(pending, block_seconds=1.0).items():
                self._take(name, output)

    def _submit(self, count: int) -> None:
        new = [
            OpenRequest(self.draw.choice(self.questions), self.draw.random() < CANCELLED_SHARE)
            for _ in range(count)
        ]
        sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
        handles = self.client.submit_many(
            {
                "prompt": one.question.prompt,
                "sampling": sampling,
                "priority": self.draw.choice(("low", "normal", "high")),
            }
            for one in new
        )
        for handle, one in zip(handles, new, strict=True):
            self._open[handle.request_id] = one
            if one.is_cancelled and self.draw.random() < 0.5:
                handle.cancel()

    def _take(self, name: str, output: OutputRead) -> None:
        request = self._open[name]
        for chunk in output.chunks:
            if chunk.start != len(request.token_ids):
                raise SoakFailed(f"{name}: token {chunk.start} is out of order")
            request.token_ids += chunk.token_ids
            request.text += chunk.text
        completion = output.completion
        if completion is None:
            if request.is_cancelled:
                self.client.cancel(name)
            return
        del self._open[name]
        request.text += completion.tail
        state = str(completion.state)
        self.seen[state] += 1
        self.seen["preemptions"] += completion.preemptions
        self.seen["cached_prompt_tokens"] += completion.usage.cached_tokens
        self.seen["generated_tokens"] += len(request.token_ids)
        check_answer(name, request, state=state)


def check_answer(name: str, request: OpenRequest, *, state: str) -> None:
    """The gate for one request that ended in `state`. SoakFailed."""
    expected, count = request.question, len(request.token_ids)
    if state == "completed":
        is_right = (request.token_ids, request.text) == (expected.token_ids, expected.text)
    else:
        is_right = request.is_cancelled and state == "cancelled"
        is_right &= request.token_ids == expected.token_ids[:count]
        is_right &= expected.text.startswith(request.text)
    if not is_right:
        raise SoakFailed(f"{name}, {expected.prompt!r}: {state} with {request.text!r}")


def read_at_rest(connection: Redis, broker: Broker, worker_pid: int) -> dict[str, int]:
    """Wait until no key of a request is left in Redis; returns the memory of both processes."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    patterns = [f"{broker.keys.prefix}:{kind}:*" for kind in "rbo"]
    while any(left := [key for p in patterns for key in connection.scan_iter(p, count=1000)]):
        if time.monotonic() > give_up:
            raise SoakFailed(f"{len(left)} keys of ended requests are left, one is {left[0]!r}")
        time.sleep(POLL_SECONDS)
    pages = int(Path(f"/proc/{worker_pid}/statm").read_text().split()[1])
    return {
        "worker_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "redis_bytes": connection.info("memory")["used_memory"],
        "redis_keys": connection.dbsize(),
    }


def judge(readings: Mapping[str, list[int]], seen: Counter[str], num_requests: int) -> None:
    """The gate for the whole run. SoakFailed."""
    if len(set(readings["redis_keys"])) > 1:
        raise SoakFailed(f"the number of keys at rest changes: {readings['redis_keys']}")
    for process in ("worker", "redis"):
        try:
            growth_of_last_half(readings[f"{process}_bytes"], num_requests)
        except SoakFailed as failure:
            raise SoakFailed(f"{process}: {failure}") from failure
    for kind in ("completed", "cancelled", "preemptions", "cached_prompt_tokens"):
        if not seen[kind]:
            raise SoakFailed(f"never happened, so never soaked: {kind}")


def soak(num_requests: int, seed: int) -> dict[str, Any]:
    """Run one soak and return its record. SoakFailed if it fails the gate."""
    asked = questions(seed)
    readings: dict[str, list[int]] = {}
    started = time.perf_counter()
    with LocalRedis.start() as redis, connect(redis.url) as connection:
        broker = Broker(connection, queue="soak", retention_seconds=RETENTION_SECONDS)
        with worker(redis, broker, WORKER_FLAGS) as pid:
            one = ServiceSoak(Client(broker), broker, asked, random.Random(seed))
            for tenth in range(1, 11):
                one.run(num_requests // 10)
                for name, value in read_at_rest(connection, broker, pid).items():
                    readings.setdefault(name, []).append(value)
                sizes = [
                    readings[f"{process}_bytes"][-1] / 2**20 for process in ("worker", "redis")
                ]
                print(
                    f"{tenth * num_requests // 10:>8} requests, worker {sizes[0]:.1f} MiB,"
                    f" Redis {sizes[1]:.2f} MiB, {readings['redis_keys'][-1]} keys",
                    flush=True,
                )
    judge(readings, one.seen, num_requests)
    return {
        "requests": num_requests,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        **one.seen,
        **{f"{name}_at_tenths": values for name, values in readings.items()},
    }


if __name__ == "__main__":
    run_command(soak, description=__doc__.splitlines()[0], num_requests=20_000)
