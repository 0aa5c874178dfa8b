"""Over HTTP: gateway, Redis and worker beside vLLM's own server and our engine alone.

    python -m benchmarks.peers.bench_http [--vllm .venv-vllm] [--models SMOLLM2]
        [--workloads W1,W2] [--rounds 5] [--json FILE]

Each request is one call of `/v1/completions` with `stream`; all calls of a workload are open at
once, and one client reads the events of both servers in the same way. In each round all three run
once on the same cores with the same requests, in turns; those that wait are stopped. The prompts
change from round to round. The shares are medians of the ratios of the rounds. vLLM runs with the
threads and the preloaded libraries that its manual recommends. The gate: each request has the
requested number of tokens, and transformers in float32 agrees with our tokens as often as with
vLLM's, as far as so many tokens can tell.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_gateway import HOST, QUEUE, gateway_process
from benchmarks.bench_peers import figures_of_run
from benchmarks.bench_service import flags_of, worker
from benchmarks.common.arguments import names_of
from benchmarks.common.figures import Figures, commit, figures_of, machine, median_run
from benchmarks.common.gate import Reference
from benchmarks.common.models import REAL_MODEL, SHAPES, model_folder, vocab_size_of
from benchmarks.common.workloads import Workload, make_workload
from benchmarks.peers.bench_vllm import Gate, Tokens, warm_up
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.register import OURS, PEERS, PEERS_FOLDER, ROOT, vllm_settings
from benchmarks.peers.vllm_cpu import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from quire import Broker, LocalRedis, connect
from quire.cli.usage import positive

WORKLOADS = ("W1", "W2")
READY_SECONDS = 300.0
POLL_SECONDS = 0.2
#: The longest that one run may take.
RUN_SECONDS = 600.0
#: Longer than a stopped worker may be away.
LEASE_SECONDS = "3600"

#: One run: its figures, and the tokens of each request.
Run = tuple[Figures, Tokens]


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are compared; `pids` are its processes, or the leaders of their groups."""

    title: str
    run: Callable[[Workload], Run]
    pids: Sequence[int] = ()

    def stand_still(self) -> None:
        """Stop its processes."""
        for pid in self.pids:
            os.killpg(pid, signal.SIGSTOP)

    def take_turn(self, workload: Workload) -> Run:
        """Run the workload while its processes run."""
        for pid in self.pids:
            os.killpg(pid, signal.SIGCONT)
        try:
            return self.run(workload)
        finally:
            self.stand_still()


def call_server(port: int, model: str, workload: Workload) -> Run:
    """Make all calls of a workload at once, and read their events."""
    return asyncio.run(_call_all(port, model, workload))


async def _call_all(port: int, model: str, workload: Workload) -> Run:
    started = time.perf_counter()

    async def call(prompt: Sequence[int], num_tokens: int) -> tuple[list[int], list[Any]]:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        pieces = []
        async for choice in _choices(port, json.dumps(body).encode()):
            if news := choice.get("token_ids"):
                tokens += news
                pieces.append((time.perf_counter() - started, len(news)))
        return tokens, pieces

    async with asyncio.timeout(RUN_SECONDS):
        found = await asyncio.gather(
            *(call(item.prompt_token_ids, item.num_output_tokens) for item in workload.items)
        )
    arrivals = {str(index): pieces for index, (_, pieces) in enumerate(found)}
    return figures_of(arrivals), [tokens for tokens, _ in found]


async def _choices(port: int, body: bytes) -> AsyncIterator[Any]:
    """Yields the choice of each event. SystemExit if the server refuses the call."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        writer.write((head + kind).encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"{status.decode().strip()}: {(await reader.read()).decode()}")
        async for line in reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]
    finally:
        writer.close()


@contextmanager
def vllm_server(environment: Path, model: str, *, log: Path) -> Iterator[tuple[int, int]]:
    """Starts vLLM's server and waits until it is ready; yields its process group and its port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    sizes = {
        "dtype": "bfloat16",
        "block-size": BLOCK_SIZE,
        "max-num-seqs": MAX_NUM_SEQS,
        "max-num-batched-tokens": MAX_NUM_BATCHED_TOKENS,
        "max-model-len": 8192,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    module = [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    address = ["--host", HOST, "--port", str(port), "--served-model-name", model]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*module, "--model", str(model_folder(model)), *address, *flags],
            env={**os.environ, **vllm_settings(environment), "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, port, log)
        yield process.pid, port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up = time.monotonic() + READY_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise SystemExit(f"vLLM's server ended; its last words are in {log}")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=POLL_SECONDS):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    raise SystemExit(f"vLLM's server is not ready; see {log}")


@contextmanager
def all_sides(model: str, vllm: Path) -> Iterator[tuple[Side, Side, Side]]:
    """Yields the engine alone, our service and vLLM's server; all are loaded, and stand still."""
    logs = PEERS_FOLDER / "runs"
    with ExitStack() as stack:
        group, theirs = stack.enter_context(
            vllm_server(vllm, model, log=logs / f"http-vllm-{model}.log")
        )
        peer = Side("vLLM's server", lambda work: call_server(theirs, model, work), [group])
        warm = [warm_up(name, vocab_size=vocab_size_of(model)) for name in WORKLOADS]
        _warm_up(peer, warm)
        engine = PeerProcess(
            PEERS[OURS], model=model_folder(model), dtype="bf16", log=logs / f"http-{model}.log"
        )
        stack.callback(engine.close)
        alone = Side("engine alone", lambda work: _run_alone(engine, work))
        _warm_up(alone, warm)
        redis = stack.enter_context(LocalRedis.start())
        connection = stack.enter_context(connect(redis.url))
        broker = Broker(connection, queue=QUEUE, lease_seconds=float(LEASE_SECONDS))
        patience = {"lease-seconds": LEASE_SECONDS, "stall-timeout-seconds": LEASE_SECONDS}
        flags = flags_of(model, dtype="bfloat16") | patience | {"served-model-name": model}
        pid = stack.enter_context(worker(redis, broker, flags, is_leader=True))
        gateway = stack.enter_context(gateway_process(redis.url, max_open=MAX_NUM_SEQS))
        ours = Side(
            "gateway, Redis, worker", lambda work: call_server(gateway.port, model, work), [pid]
        )
        # A stopped process cannot end.
        stack.callback(lambda: os.killpg(pid, signal.SIGCONT))
        _warm_up(ours, warm)
        yield alone, ours, peer


def _warm_up(side: Side, workloads: Sequence[Workload]) -> None:
    for workload in workloads:
        side.take_turn(workload)


def _run_alone(engine: PeerProcess, workload: Workload) -> Run:
    generations = engine.run(workload)
    return figures_of_run(workload, generations), [one.tokens for one in generations]


def compare(sides: Sequence[Side], model: str, name: str, *, rounds: int) -> dict[str, object]:
    """All three in turns, in another order in each round; prints and returns the figures."""
    figures: dict[str, list[Figures]] = {side.title: [] for side in sides}
    gate = Gate(Reference(model), dtype="bf16")
    outputs = []
    for number in range(rounds):
        workload = make_workload(name, vocab_size=vocab_size_of(model), turn=number)
        tokens: dict[str, Tokens] = {}
        for side in (*sides[number % 3 :], *sides[: number % 3]):
            one, tokens[side.title] = side.take_turn(workload)
            figures[side.title].append(one)
        outputs.append((workload, tokens[sides[1].title], tokens[sides[2].title]))
    for output in outputs:
        gate.check(*output)
    print(f"\n{model} bf16 {name}")
    print(Figures.header())
    for title, runs in figures.items():
        print(median_run(runs).line(title))
    alone, ours, peer = figures.values()
    record = {
        "sides": {title: asdict(median_run(runs)) for title, runs in figures.items()},
        "of_the_engine": _ratios(ours, alone, "output_tokens_per_second"),
        "of_vllm": _ratios(ours, peer, "output_tokens_per_second"),
        "gap_of_vllm": _ratios(ours, peer, "inter_token_ms"),
        "agreement": {"ours": gate.ours.share, "vllm": gate.theirs.share},
    }
    for share in ("of_the_engine", "of_vllm", "gap_of_vllm"):
        print(f"{share:24} {record[share]}")
    return record


def _ratios(ours: Sequence[Figures], theirs: Sequence[Figures], figure: str) -> dict[str, object]:
    each = [
        getattr(one, figure) / getattr(other, figure)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return {"median": round(statistics.median(each), 3), "each": [round(one, 3) for one in each]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm", help="its environment")
    parser.add_argument(
        "--models", type=names_of("model", (REAL_MODEL, *SHAPES)), default=REAL_MODEL
    )
    parser.add_argument("--workloads", type=names_of("workload", WORKLOADS), default="W1,W2")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, object] = {"machine": machine(), "commit": commit()}
    for model in arguments.models:
        with all_sides(model, arguments.vllm) as sides:
            for name in arguments.workloads:
                record[f"{model}-{name}"] = compare(sides, model, name, rounds=arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
