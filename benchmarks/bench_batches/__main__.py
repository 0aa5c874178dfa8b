"""A batch through HTTP, compared with `quire run-batch` of the same lines.

    python -m benchmarks.bench_batches [--lines 50000] [--rounds 1] [--json FILE]

A worker with a fake model answers, so that what is measured is the way of a line: upload, batcher,
queue, results, download. Both ways run alternately against one worker and one Redis, each in
processes of their own. The memory of the batcher is sampled while it runs: growth counts from a
fifth of the lines on, when as many requests are open as there will be at any later time.

The gate: each line has exactly one result, and the right text; both ways have the same texts.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.bench_protocol import private_server
from benchmarks.common.figures import machine, process_seconds
from quire.cli.usage import positive

QUEUE = "batches"
ENDPOINT = "/v1/completions"
#: Between two looks at the batch and at the memory of the batcher.
POLL_SECONDS = 0.25
GIVE_UP_SECONDS = 900.0
#: The part of the lines after which the memory of the batcher should not grow any more.
WARM = 0.2


def write_input(path: Path, num_lines: int, *, name: str) -> None:
    """Lines whose prompts differ, with few tokens: the way of a line is what counts."""
    with path.open("w") as file:
        for number in range(num_lines):
            body = {"prompt": [number % 50, number // 50 % 50], "max_tokens": 4, "seed": 0}
            line = {"custom_id": f"{name}-{number}", "method": "POST", "url": ENDPOINT}
            file.write(json.dumps({**line, "body": body}) + "\n")


@contextmanager
def process(
    module: str, *flags: str, ready: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A process of ours: its pid, and the log line `ready`."""
    command = [sys.executable, "-m", module, *flags, "--http-port", "0", "--log-format", "json"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables or {})
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    assert child.stderr is not None
    try:
        events = (json.loads(line) for line in child.stderr if line.startswith("{"))
        line = next(event for event in events if event["event"] == ready)
        # A full pipe would block the process.
        threading.Thread(target=child.stderr.read, daemon=True).start()
        yield child.pid, line
    finally:
        child.kill()
        child.wait()


class Memory:
    """The resident size of a process, in bytes, sampled while a batch runs."""

    def __init__(self, pid: int) -> None:
        self._statm = Path(f"/proc/{pid}/statm")
        #: (part of the lines that is done, bytes)
        self.samples: list[tuple[float, int]] = []

    def sample(self, part: float) -> None:
        """Look at it now."""
        pages = int(self._statm.read_text().split()[1])
        self.samples.append((part, pages * resource.getpagesize()))

    def at(self, part: float) -> int:
        """Its size when this part of the lines was done for the first time."""
        return next((size for done, size in self.samples if done >= part), self.samples[-1][1])

    @property
    def growth_bytes(self) -> int:
        """By how much its median grew between the third and the last part of the run."""
        warm = [size for part, size in self.samples if part >= WARM]
        third = max(1, len(warm) // 3)
        return int(statistics.median(warm[-third:]) - statistics.median(warm[:third]))


def through_http(client: OpenAI, source: Path, num_lines: int, memory: Memory) -> tuple[float, str]:
    """Upload, run and download; seconds, and the text of the output."""
    began = time.perf_counter()
    with source.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.perf_counter() - began < GIVE_UP_SECONDS, batch.status
        time.sleep(POLL_SECONDS)
        batch = client.batches.retrieve(batch.id)
        memory.sample(batch.request_counts.completed / num_lines)
    assert batch.status == "completed" and batch.output_file_id, batch
    text = client.files.content(batch.output_file_id).text
    return time.perf_counter() - began, text


def by_command(url: str, source: Path, folder: Path) -> tuple[float, str]:
    """`quire run-batch`; seconds, and the text of the output."""
    output = folder / f"{source.stem}.out.jsonl"
    began = time.perf_counter()
    command = [sys.executable, "-m", "quire.cli", "run-batch", "--redis-url", url]
    files = ["-i", str(source), "-o", str(output), "--queue", QUEUE]
    subprocess.run([*command, *files], check=True, capture_output=True, timeout=GIVE_UP_SECONDS)
    text = output.read_text()
    return time.perf_counter() - began, text


def children_seconds() -> float:
    """Processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def texts_of(output: str, name: str) -> list[str]:
    """The texts in the order of the lines; asserts one result for each."""
    texts: dict[int, str] = {}
    for line in output.splitlines():
        result = json.loads(line)
        number = int(result["custom_id"].removeprefix(f"{name}-"))
        assert number not in texts, f"line {number} has two results"
        texts[number] = result["response"]["body"]["choices"][0]["text"]
    assert sorted(texts) == list(range(len(texts)))
    return [texts[number] for number in range(len(texts))]


def measure(url: str, folder: Path, *, num_lines: int, rounds: int) -> dict[str, object]:
    """Both ways alternately."""
    shared = ("--redis-url", url, "--queue", QUEUE)
    storage = ("--files-folder", str(folder / "files"))
    worker_flags = ("--max-num-seqs", "256", "--served-model-name", "fake")
    with ExitStack() as stack:
        stack.enter_context(
            process(
                "tests.service.fake_worker",
                *shared,
                *worker_flags,
                ready="worker ready",
                variables={"QUIRE_TEST_STEP_SECONDS": "0"},
            )
        )
        _, gateway = stack.enter_context(
            process("service.gateway", *shared, *storage, ready="gateway ready")
        )
        pid, _ = stack.enter_context(
            process("service.batcher", *shared, *storage, ready="batcher ready")
        )
        address = f"http://127.0.0.1:{gateway['http_port']}/v1"
        client = stack.enter_context(OpenAI(base_url=address, api_key="unused"))
        memory, rates = Memory(pid), {"http": list[float](), "command": list[float]()}
        used, command_seconds = process_seconds(pid), 0.0
        for number in range(rounds):
            texts: dict[str, Sequence[str]] = {}
            for way in sorted(rates, reverse=number % 2 == 1):
                name = f"{way}-{number}"
                source = folder / f"{name}.jsonl"
                write_input(source, num_lines, name=name)
                if way == "http":
                    seconds, output = through_http(client, source, num_lines, memory)
                else:
                    before = children_seconds()
                    seconds, output = by_command(url, source, folder)
                    command_seconds += children_seconds() - before
                rates[way].append(num_lines / seconds)
                texts[way] = texts_of(output, name)
            assert texts["http"] == texts["command"] and len(texts["http"]) == num_lines
        ratios = [ours / other for ours, other in zip(rates["http"], rates["command"], strict=True)]
        return {
            "http_lines_per_second": statistics.median(rates["http"]),
            "command_lines_per_second": statistics.median(rates["command"]),
            "http_over_command": statistics.median(ratios),
            "ratios": ratios,
            "batcher_processor_ms_per_line": 1000
            * (process_seconds(pid) - used)
            / (rounds * num_lines),
            # With its start and its imports.
            "command_processor_ms_per_line": 1000 * command_seconds / (rounds * num_lines),
            "batcher_mib_at": {f"{part:.0%}": memory.at(part) / 2**20 for part in (0.1, 0.5, 1.0)},
            "batcher_peak_mib": max(size for _, size in memory.samples) / 2**20,
            "batcher_growth_mib": memory.growth_bytes / 2**20,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=positive, default=50_000)
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, object] = {"machine": machine(), "lines": arguments.lines}
    with private_server() as connection, tempfile.TemporaryDirectory() as folder:
        settings = connection.connection_pool.connection_kwargs
        url = f"redis://{settings['host']}:{settings['port']}/{settings['db']}"
        record |= measure(url, Path(folder), num_lines=arguments.lines, rounds=arguments.rounds)
    print(json.dumps(record, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
