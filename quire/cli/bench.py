"""`quire bench`: submits requests at a given rate to a queue, and measures their latencies.

It measures the whole path: submit, queue, worker, log, reader. Times are taken in the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.cli.console import Console, add_server, async_client_of, flags_of, not_negative
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_PARTIAL
from quire.cli.usage import positive
from quire.client.client_async import AsyncClient
from quire.errors import InvalidRequest, QuireError
from quire.wire.arguments import RequestArguments

#: The metrics in milliseconds, with the names of vLLM's benchmark.
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (excl. 1st)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire bench`; the names are those of vLLM's benchmark."""
    parser.add_argument(
        "--num-prompts", type=positive, default=100, metavar="N", help="requests [100]"
    )
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="JSONL: prompt, max_tokens")
    parser.add_argument(
        "--input-len", type=positive, default=32, metavar="N", help="random tokens per prompt [32]"
    )
    parser.add_argument(
        "--output-len",
        type=positive,
        default=32,
        metavar="N",
        help="tokens to generate per request [32]",
    )
    vocabulary = "random token ids are below it [32]"
    parser.add_argument("--vocab-size", type=positive, default=32, metavar="N", help=vocabulary)
    rate = "arrivals per second; inf sends all at once [inf]"
    parser.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help=rate)
    shape = "1 is a Poisson process, less is burstier [1]"
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B", help=shape)
    width = "requests in flight at once [all]"
    parser.add_argument("--max-concurrency", type=positive, metavar="N", help=width)
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of the sampling [0]"
    )
    parser.add_argument("--adapter", metavar="NAME", help="adapter of the model to use")
    source = "for random prompts and arrival times [0]"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=source)
    limit = "limit for one request [600]"
    parser.add_argument(
        "--timeout", type=not_negative, default=600.0, metavar="SECONDS", help=limit
    )
    shown = "percentiles to print of each latency [50,90,99]"
    parser.add_argument("--metric-percentiles", default="50,90,99", metavar="P,P", help=shown)
    goal = "limits in milliseconds, for instance ttft:200 tpot:50"
    parser.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=goal)
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="write JSON there")
    add_server(parser)


def run_bench(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the figures; 3 when some requests failed, 1 when all did."""
    percentiles = _percentiles(arguments.metric_percentiles)
    goals = _goals(arguments.goodput)
    requests = _requests(arguments)
    samples, seconds = asyncio.run(_run(arguments, requests, console))
    console.end_progress()
    figures = figures_of(samples, seconds, percentiles=percentiles, goals=goals)
    if console.is_json:
        console.data(figures)
    else:
        _print(figures, console)
    if arguments.save_result:
        # Last, so that the figures are printed even if the file cannot be written.
        _save(arguments.save_result, figures)
    failed = figures["failed"]
    if failed:
        console.complain(f"{failed} failed, the first: {next(s.error for s in samples if s.error)}")
    if not failed:
        return EXIT_OK
    return EXIT_PARTIAL if figures["completed"] else EXIT_ERROR


@dataclass(slots=True)
class Sample:
    """The times of one request as its reader saw them, in seconds of the monotonic clock."""

    began: float
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    ended: float = 0.0
    error: str | None = None

    def metric(self, name: str) -> float | None:
        """ttft, tpot or e2el in milliseconds; None if there were too few tokens for it."""
        if name == "e2el":
            return (self.ended - self.began) * 1000
        if not self.num_tokens:
            return None
        if name == "ttft":
            return (self.first - self.began) * 1000
        return (self.last - self.first) / (self.num_tokens - 1) * 1000 if self.gaps else None


def figures_of(
    samples: Sequence[Sample],
    seconds: float,
    *,
    percentiles: Sequence[float],
    goals: dict[str, float],
) -> dict[str, Any]:
    """The figures of a run. A chunk of n tokens counts as n equal gaps."""
    good = [sample for sample in samples if sample.error is None]
    tokens = sum(sample.num_tokens for sample in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(samples) - len(good),
        "seconds": seconds,
        "prompt_tokens": sum(sample.num_prompt_tokens for sample in good),
        "output_tokens": tokens,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
    }
    for name in METRICS:
        if name == "itl":
            values = [gap * 1000 for sample in good for gap in sample.gaps]
        else:
            values = [v for sample in good if (v := sample.metric(name)) is not None]
        figures[name] = _summary(values, percentiles)
    if goals:
        within = [s for s in good if all((s.metric(n) or 0) <= ms for n, ms in goals.items())]
        figures["goodput_requests_per_second"] = len(within) / seconds
    return figures


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between neighbours. `values` must not be empty."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    summary = {"mean": sum(values) / len(values)}
    return summary | {f"p{percent:g}": percentile(values, percent) for percent in percentiles}


def _percentiles(text: str) -> list[float]:
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequest("metric-percentiles", str(error)) from error
    if not all(0 <= percent <= 100 for percent in percents):
        raise InvalidRequest("metric-percentiles", f"{text}: each must lie between 0 and 100")
    return percents


def _save(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise InvalidRequest("save-result", str(error)) from error


def _goals(texts: Sequence[str]) -> dict[str, float]:
    goals: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in METRICS or name == "itl":
            raise InvalidRequest("goodput", f"{text!r} is not ttft, tpot or e2el with a limit")
        try:
            goals[name] = float(limit)
        except ValueError as error:
            raise InvalidRequest("goodput", f"{text!r}: {error}") from error
    return goals


def _requests(arguments: argparse.Namespace) -> list[RequestArguments]:
    if not (arguments.request_rate > 0 and 0 < arguments.burstiness < math.inf):
        raise InvalidRequest("request-rate, burstiness", "must be positive numbers")
    source = random.Random(arguments.seed)  # noqa: S311 (repeatable on purpose)
    fixed: dict[str, Any] = {"temperature": arguments.temperature, "seed": arguments.seed}
    if arguments.dataset is None:
        fixed |= {"max_tokens": arguments.output_len, "ignore_eos": True}
        return [
            {"prompt": source.choices(range(arguments.vocab_size), k=arguments.input_len),
             "sampling": fixed, "adapter": arguments.adapter}
            for _ in range(arguments.num_prompts)
        ]  # fmt: skip
    lines = _dataset(arguments.dataset)
    chosen = [lines[index % len(lines)] for index in range(arguments.num_prompts)]
    length = arguments.output_len
    return [
        {
            "prompt": line["prompt"],
            "sampling": fixed | {"max_tokens": line.get("max_tokens", length)},
            "adapter": arguments.adapter,
        }
        for line in chosen
    ]


def _dataset(path: Path) -> list[dict[str, Any]]:
    try:
        # A line ends at LF only: texts may contain other characters that Python's splitlines()
        # treats as line ends.
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise InvalidRequest("dataset", str(error)) from error
    if not lines:
        raise InvalidRequest("dataset", f"{path} has no lines")
    if not all(isinstance(line, dict) and "prompt" in line for line in lines):
        raise InvalidRequest("dataset", f"{path}: each line must be an object with a `prompt`")
    return lines


async def _run(
    arguments: argparse.Namespace, requests: Sequence[RequestArguments], console: Console
) -> tuple[list[Sample], float]:
    client = async_client_of(arguments)
    turns = asyncio.Semaphore(arguments.max_concurrency or len(requests))
    began = time.monotonic()
    samples: list[Sample] = []
    tasks: list[asyncio.Task[None]] = []
    group = f"bench-{secrets.token_hex(4)}"

    async def one(request: RequestArguments) -> None:
        async with turns:
            sample = await _measure(client, request, timeout=arguments.timeout)
        samples.append(sample)
        console.progress(f"{len(samples)}/{len(requests)} requests")

    try:
        source = random.Random(arguments.seed)  # noqa: S311 (repeatable on purpose)
        due = began
        for number, request in enumerate(requests):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            named = request | {"request_id": f"{group}~{number}"}
            tasks.append(asyncio.create_task(one(named)))
            if math.isfinite(arguments.request_rate):
                shape = arguments.burstiness
                due += source.gammavariate(shape, 1 / (arguments.request_rate * shape))
        await asyncio.gather(*tasks)
        return samples, time.monotonic() - began
    finally:
        await _stop(tasks)
        await _cancel_rest(client, group, console, flags=flags_of(arguments))
        await client.close()


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels the tasks and waits for them, so that none submits anything afterwards."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel_rest(client: AsyncClient, group: str, console: Console, *, flags: str) -> None:
    """Cancels the requests that are still open, so that they do not delay other users' requests."""
    try:
        num_open = await client.attach_group(group).cancel()
    except (QuireError, asyncio.CancelledError):
        console.complain(
            f"some requests may still run; to end them: quire cancel --group {group}{flags}"
        )
        raise
    if num_open:
        console.complain(f"{num_open} requests that had not ended were cancelled")


async def _measure(client: AsyncClient, request: RequestArguments, *, timeout: float) -> Sample:
    sample = Sample(began=time.monotonic(), num_prompt_tokens=_prompt_length(request))
    try:
        async with asyncio.timeout(timeout):
            (handle,) = await client.submit_many([request])
            async for chunk in handle.stream():
                now, count = time.monotonic(), len(chunk.token_ids)
                if sample.num_tokens:
                    sample.gaps += [(now - sample.last) / count] * count
                else:
                    sample.first = now
                sample.last = now
                sample.num_tokens += count
    except TimeoutError:
        sample.error = f"no end after {timeout:g} s"
    except QuireError as error:
        sample.error = str(error)
    sample.ended = time.monotonic()
    return sample


def _prompt_length(request: RequestArguments) -> int:
    """Tokens of a prompt of ids; 0 for a text, whose number of tokens only the worker knows."""
    prompt = request.get("prompt")
    return 0 if prompt is None or isinstance(prompt, str) else len(prompt)


def _print(figures: dict[str, Any], console: Console) -> None:
    plain = {name: value for name, value in figures.items() if not isinstance(value, dict)}
    console.table(
        ("figure", "value"),
        [(n, f"{v:.2f}" if isinstance(v, float) else v) for n, v in plain.items() if v is not None],
    )
    for name, title in METRICS.items():
        if summary := figures[name]:
            cells = "  ".join(f"{key} {value:.2f}" for key, value in summary.items())
            console.data(None, f"{title} (ms): {cells}")
