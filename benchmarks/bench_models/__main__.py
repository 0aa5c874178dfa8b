"""One worker of several models, against a worker process that is restarted at each switch.

    python -m benchmarks.bench_models [--models abacus,TINY,SMALL] [--bursts 12] [--requests 8]
                                      [--tokens 32] [--json FILE]

The traffic is a sequence of bursts: each is for one model, another one than the burst before, and
comes when that one has ended. So every burst needs a switch, on each side:

- restart: a worker process with this model is started, runs the burst, and ends (`burst`).
- loaded: one worker of all models, which keeps one in memory.
- kept: one worker of all models, which keeps all in memory.

The first burst of each side begins with a worker that is ready, as far as the side has one. Prints
tokens per second and the ratios to `restart`. The gate: all sides generate the same tokens, in
float32, and each request has one end and as many tokens as it asked for.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.figures import machine
from benchmarks.common.models import SHAPES, model_folder
from quire import Client, LocalRedis
from quire.cli.usage import positive
from service.worker.settings.config import EMBEDDED_MODEL

READY_SECONDS = 180.0
#: The name of the embedded model here.
ABACUS = "abacus"
#: Small enough for all models together, large enough for a burst.
KV_CACHE_BYTES = 32 << 20
#: More than all models and their caches take.
ALL_BYTES = 8 << 30
#: Flags of every worker.
COMMON = (
    *("--device", "cpu", "--dtype", "float32", "--http-port", "0", "--log-format", "json"),
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--switch-stay-seconds", "0"),
)

#: The tokens of all requests, in their order.
Tokens = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests of one model that come together; each prompt is a list of token ids."""

    model: str
    prompts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One side: the tokens that it generated, and how long it took."""

    tokens: Tokens
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def make_bursts(models: Sequence[str], *, count: int, num_requests: int) -> list[Burst]:
    """Bursts in a random order in which no model follows itself."""
    chance, bursts = random.Random(0), list[Burst]()
    while len(bursts) < count:
        model = chance.choice(models)
        if not bursts or bursts[-1].model != model or len(models) == 1:
            prompts = [chance.choices(range(3, 250), k=24) for _ in range(num_requests)]
            bursts.append(Burst(model, prompts))
    return bursts


def source_of(model: str) -> Path:
    return EMBEDDED_MODEL if model == ABACUS else model_folder(model)


@contextmanager
def submitted(url: str, burst: Burst, *, num_tokens: int) -> Iterator[Callable[[], Tokens]]:
    """Submit a burst; yields a function that waits for its tokens.

    Each request ends at its length only.
    """
    with Client(url, queue=burst.model) as client:
        sampling = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        handles = [client.submit(list(prompt), sampling=sampling) for prompt in burst.prompts]
        yield lambda: [tuple(one.result(timeout=READY_SECONDS).token_ids) for one in handles]


def with_restarts(url: str, bursts: Sequence[Burst], *, num_tokens: int) -> Run:
    """A new worker process for each burst, started when its requests are there."""
    began, tokens = time.monotonic(), Tokens()
    for burst in bursts:
        flags = ("--model", str(source_of(burst.model)), "--served-model-name", burst.model)
        # Submitted first: a worker with `burst` ends as soon as nothing waits.
        with (
            submitted(url, burst, num_tokens=num_tokens) as wait,
            worker(url, "--queue", burst.model, "--burst", *flags),
        ):
            tokens += wait()
    return Run(tokens, time.monotonic() - began)


def with_one_worker(
    url: str, bursts: Sequence[Burst], table: Path, *flags: str, num_tokens: int
) -> Run:
    """One worker of all models; the clock starts when it is ready."""
    with worker(url, "--models-file", str(table), *flags) as wait_until_ready:
        wait_until_ready()
        began, tokens = time.monotonic(), Tokens()
        for burst in bursts:
            with submitted(url, burst, num_tokens=num_tokens) as wait:
                tokens += wait()
        return Run(tokens, time.monotonic() - began)


@contextmanager
def worker(url: str, *flags: str) -> Iterator[Callable[[], None]]:
    """A worker process; yields a function that waits until it is ready."""
    command = [sys.executable, "-m", "service", "--redis-url", url, *COMMON, *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env=dict(os.environ))

        def wait_until_ready() -> None:
            give_up = time.monotonic() + READY_SECONDS
            while time.monotonic() < give_up and process.poll() is None:
                log.seek(0)
                if "worker ready" in log.read():
                    return
                time.sleep(0.05)
            raise SystemExit("the worker is not ready")

        try:
            yield wait_until_ready
        finally:
            process.terminate()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise SystemExit(f"the worker failed:\n{log.read()[-2000:]}")


def check(runs: Mapping[str, Run], *, num_tokens: int) -> None:
    """The gate: every side generated what the first one did, and everything that was asked for."""
    expected = next(iter(runs.values())).tokens
    for name, run in runs.items():
        if any(len(one) != num_tokens for one in run.tokens):
            raise SystemExit(f"{name}: a request has not as many tokens as it asked for")
        if run.tokens != expected:
            raise SystemExit(f"{name}: the tokens differ")
    if len(set(expected)) < len(expected) // 2:
        raise SystemExit("most outputs are the same: equal tokens would prove nothing")


def measure(bursts: Sequence[Burst], *, num_tokens: int) -> dict[str, Run]:
    """All sides, each on a Redis of its own."""
    models = list(dict.fromkeys(burst.model for burst in bursts))
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "models.toml"
        entries = [
            f'[models.{model}]\nqueue = "{model}"\nsource = "{source_of(model)}"\n'
            for model in models
        ]
        table.write_text("".join(entries))
        sides: dict[str, Callable[[str], Run]] = {
            "restart": lambda url: with_restarts(url, bursts, num_tokens=num_tokens),
            "loaded": lambda url: with_one_worker(url, bursts, table, num_tokens=num_tokens),
            "kept": lambda url: with_one_worker(
                url, bursts, table, "--models-memory-bytes", str(ALL_BYTES), num_tokens=num_tokens
            ),
        }
        for name, side in sides.items():
            with LocalRedis.start() as redis:
                runs[name] = side(redis.url)
    check(runs, num_tokens=num_tokens)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=f"{ABACUS},TINY,SMALL")
    parser.add_argument("--bursts", type=positive, default=12)
    parser.add_argument("--requests", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := set(models) - {ABACUS, *SHAPES}:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    bursts = make_bursts(models, count=arguments.bursts, num_requests=arguments.requests)
    runs = measure(bursts, num_tokens=arguments.tokens)
    base = runs["restart"]
    print(f"{len(bursts)} bursts of {arguments.requests} requests, {arguments.tokens} tokens each")
    for name, run in runs.items():
        ratio = run.tokens_per_second / base.tokens_per_second
        print(
            f"{name:8} {run.seconds:7.1f} s {run.tokens_per_second:9.1f} tok/s {ratio:6.2f} times"
        )
    if arguments.json:
        sides = {
            name: {"seconds": run.seconds, "tokens_per_second": run.tokens_per_second}
            for name, run in runs.items()
        }
        arguments.json.write_text(json.dumps({"machine": machine(), **sides}, indent=2) + "\n")


if __name__ == "__main__":
    main()
