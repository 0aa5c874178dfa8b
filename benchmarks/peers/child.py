"""The child process of a comparison: loads one engine, runs workloads, returns the outputs.

It reads one JSON object per line from standard input, and answers each with one line on standard
output:

    {"model": folder, "dtype": "bf16" | "fp32", "workspace": folder}     → {"ready": facts}
    {"requests": [{"prompt": ids, "num_output_tokens": n, "arrival_seconds": s}, ...]}
                                       → {"generations": [{"tokens": ids, "seconds": times}, ...]}
    {"logits_of": ids, "to": file}     → {"written": file}, if the engine can write them

All output of libraries goes to standard error. The child ends at the end of its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Request:
    """One request. `arrival_seconds` counts from the start of the run."""

    prompt: list[int]
    num_output_tokens: int
    arrival_seconds: float = 0.0


@dataclass
class Generation:
    """The tokens of one request, and the time at which each could be read."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class ServedEngine(Protocol):
    """One loaded engine. `facts` has its version and the settings that affect its speed."""

    facts: dict[str, object]

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate greedily, ignoring the end of sequence; one Generation per request, in order."""


@runtime_checkable
class WritesLogits(Protocol):
    """An engine that can write its logits."""

    def write_logits(self, tokens: Sequence[int], to: Path) -> None:
        """Write the logits after each token of a prompt, [tokens, vocabulary], in float32."""


def serve(load: Callable[[Path, str, Path], ServedEngine]) -> None:
    """Answer the parent until it closes the pipe. The first message loads the engine.

    It is loaded by `load(model, dtype, workspace)`.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine: ServedEngine | None = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, object]
        if engine is None:
            before, started, used = memory(), time.perf_counter(), time.process_time()
            engine = load(Path(message["model"]), message["dtype"], Path(message["workspace"]))
            seconds, cpu = time.perf_counter() - started, time.process_time() - used
            loaded = {"load_seconds": round(seconds, 2), "load_cpu_seconds": round(cpu, 2)}
            imported = {f"imported_{name}": size for name, size in before.items()}
            answer = {"ready": {**loaded, **imported, **memory(), **engine.facts}}
        elif "logits_of" in message:
            assert isinstance(engine, WritesLogits)
            engine.write_logits(message["logits_of"], Path(message["to"]))
            answer = {"written": message["to"]}
        else:
            generations = engine.run([Request(**request) for request in message["requests"]])
            answer = {"generations": [vars(generation) for generation in generations]}
        print(json.dumps(answer), file=answers, flush=True)


def memory() -> dict[str, int]:
    """The memory of this process that is in use, and the part without a file, in 10^6 bytes.

    What has a file, as the code of libraries, is in memory once for all processes.
    """
    sizes = {
        line.partition(":")[0]: int(line.split()[1]) * 1024 // 1_000_000
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    }
    return {"resident_mb": sizes["Rss"], "anonymous_mb": sizes["Anonymous"]}


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def drive(
    requests: Sequence[Request],
    *,
    add: Callable[[int, Request], None],
    has_work: Callable[[], bool],
    step: Callable[[], Iterable[tuple[int, list[int]]]],
) -> list[Generation]:
    """Run an engine step by step, and add each request at its time of arrival.

    `step` yields pairs of a request's index and its new tokens. Tokens get the time at which the
    call of `step` that yielded them has ended.
    """
    generations = [Generation() for _ in requests]
    num_added = 0
    started = time.perf_counter()
    while num_added < len(requests) or has_work():
        now = time.perf_counter() - started
        while num_added < len(requests) and requests[num_added].arrival_seconds <= now:
            add(num_added, requests[num_added])
            num_added += 1
        if not has_work():
            time.sleep(max(0.0, requests[num_added].arrival_seconds - now))
            continue
        news = list(step())
        now = time.perf_counter() - started
        for index, tokens in news:
            generations[index].tokens += tokens
            generations[index].seconds += [now] * len(tokens)
    return generations
