"""Steps of two common model shapes, compared with the limits of a GPU. Needs a CUDA device.

    python -m benchmarks.bench_gpu [--shapes 0.6B,8B] [--requests 1,8,64,256] [--json FILE]

Weights and cache are random. A step is a whole step of the runner: its tables, the forward pass
(captured as a CUDA graph or not), and the sampler. Before a cell is timed, its logits are compared
with those of the reference attention. A cell that is wrong or fails has the reason in place of
figures. The file is written after each cell.

A decode reads each weight once, and each key and value of its contexts. The share of the bandwidth
is these bytes per second of the step, divided by the bytes per second (read and written) of a copy
in the same run. The share of the arithmetic counts two operations per weight and row, and four per
key and channel of a query, divided by the rate of a large matrix product in the same run. The time
of a step is the wall-clock time until its tokens are on the host. The time of the device alone is
printed beside it.

Finally, a whole engine runs the same requests, in turns: it waits for the tokens of each step, or
launches the next one while one is in flight.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.arguments import names_of, numbers
from engine.batch import Batch, BatchRow
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.attention.reference import ReferenceAttention
from engine.model.checks.probe import TOLERANCES
from engine.model.load.fast_path import WORST_TOLERANCES
from engine.model.load.load_runner import load_runner
from engine.model.run.model_runner import ModelRunner
from engine.model.step import HostStep, compute_logits, lay_out
from engine.request import Request
from engine.sampling_params import SamplingParams

#: The shapes of Qwen3-0.6B and Qwen3-8B.
SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
HEAD_DIM, VOCAB_SIZE, DTYPE = 128, 151_936, torch.bfloat16
DEVICE = torch.device("cuda")
#: The context of a decode, and the length of a prompt that is computed in one step, in tokens.
CONTEXT, PROMPT = 512, 2048
WARM_UP_STEPS, STEPS = 5, 30
MEASUREMENTS = 10
#: For the whole engine: prompt and output tokens of each request, and the turns of each mode.
ENGINE_PROMPT, ENGINE_TOKENS, ENGINE_TURNS = 16, 256, 3


@dataclass(frozen=True, slots=True)
class Cell:
    """A step to time: its rows, the computed tokens of each row, and the length of its context."""

    name: str
    rows: int
    tokens: int
    context: int

    def batch(self, block_size: int) -> Batch:
        each = -(-self.context // block_size)
        rows = tuple(
            BatchRow(
                request_id=str(index),
                token_ids=[(5 + 7919 * place + index) % VOCAB_SIZE for place in range(self.tokens)],
                start=self.context - self.tokens,
                block_ids=range(index * each, (index + 1) * each),
                samples=True,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                prompt_token_ids=[],
                output_token_ids=[],
            )
            for index in range(self.rows)
        )
        return Batch(step=0, catch_up_rows=rows)


@dataclass(frozen=True, slots=True)
class Limits:
    """The measured limits of the device: bytes and operations per second."""

    bandwidth: float
    operations: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner, the number of weights that a token is multiplied with, and those of the head.

    `heads` is the number of attention heads of all layers together.
    """

    runner: ModelRunner
    weights: int
    head_weights: int
    heads: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=names_of("shape", SHAPES), default="0.6B,8B")
    parser.add_argument("--requests", type=numbers, default="1,8,64,256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"bench-gpu: torch {torch.__version__} sees no CUDA device: nothing was measured")
        return 0
    limits = Limits(measured_bandwidth(), measured_operations())
    name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(
        f"{name}: {limits.bandwidth / 1e12:.2f} TB/s, {limits.operations / 1e12:.0f} TFLOP/s in"
        f" {DTYPE}"
    )
    report: dict[str, Any] = {
        "device": name,
        "bytes_per_second": limits.bandwidth,
        "operations_per_second": limits.operations,
        "cells": [],
    }
    failures = 0
    for shape in arguments.shapes:
        for line in lines_of(shape, list(arguments.requests), limits):
            failures += "error" in line
            report["cells"].append(line)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


def lines_of(shape: str, counts: list[int], limits: Limits) -> Iterator[dict[str, Any]]:
    """Yields a record for each cell of a shape, or a single one if it cannot be loaded."""
    try:
        started = time.perf_counter()
        loaded = load(shape, max_num_seqs=max(counts))
    except Exception as error:  # noqa: BLE001 - another shape may still work.
        print(f"\n{shape}: {error!r}", flush=True)
        yield {"shape": shape, "error": repr(error)}
        return
    print(
        f"\n{shape}: {loaded.runner.config_facts.fingerprint}, blocks of"
        f" {loaded.runner.kv_pool.block_size}, loaded in {time.perf_counter() - started:.0f} s\n"
        f"{'':14}  ms    device   tokens/s  bandwidth  arithmetic"
    )
    cells = [Cell(f"{count} decodes", count, 1, CONTEXT) for count in counts]
    for cell in [*cells, Cell(f"prompt of {PROMPT}", 1, PROMPT, PROMPT)]:
        record = {"shape": shape, "cell": cell.name}
        try:
            record |= figures(loaded, cell, limits)
        except Exception as error:  # noqa: BLE001 - the other cells may still work.
            print(f"{cell.name:>14}  {error!r}", flush=True)
            yield record | {"error": repr(error)}
        else:
            yield record
    for count in counts:
        record = {"shape": shape, "cell": f"engine, {count} requests"}
        try:
            record |= engine_figures(loaded.runner, count)
        except Exception as error:  # noqa: BLE001 - as above.
            print(f"engine of {count}: {error!r}", flush=True)
            yield record | {"error": repr(error)}
        else:
            yield record
    del loaded
    gc.collect()
    torch.cuda.empty_cache()


def load(shape: str, *, max_num_seqs: int) -> Loaded:
    """A runner with random weights. They are made on the device: a CPU would take minutes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES[shape]
    config = Qwen3Config(
        **sizes, head_dim=HEAD_DIM, vocab_size=VOCAB_SIZE, max_position_embeddings=4096
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        torch.set_default_dtype(DTYPE)
        try:
            with DEVICE:
                model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        total = sum(parameter.numel() for parameter in model.parameters())
        del model
        gc.collect()
        torch.cuda.empty_cache()
        runner = load_runner(
            folder,
            device=DEVICE.type,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=PROMPT,
            # Only what the largest cell needs: to pin gigabytes of the host takes many seconds.
            kv_cache_memory_bytes=max(max_num_seqs * CONTEXT, PROMPT) * bytes_per_token(shape),
            num_host_blocks=0,
        )
    for layer in range(sizes["num_hidden_layers"]):
        # Random numbers, because products of zeros take less power, and so less time.
        runner.kv_pool.key_cache(layer).normal_()
        runner.kv_pool.value_cache(layer).normal_()
    head = config.vocab_size * config.hidden_size
    return Loaded(
        runner,
        weights=total if config.tie_word_embeddings else total - head,
        head_weights=head,
        heads=sizes["num_attention_heads"] * sizes["num_hidden_layers"],
    )


def bytes_per_token(shape: str) -> int:
    sizes = SHAPES[shape]
    keys_and_values = 2 * sizes["num_key_value_heads"] * HEAD_DIM
    return sizes["num_hidden_layers"] * keys_and_values * DTYPE.itemsize


def figures(loaded: Loaded, cell: Cell, limits: Limits) -> dict[str, float]:
    """Measures a cell, prints its figures, and returns them.

    Raises:
        ArithmeticError: its logits are wrong; nothing was timed.
    """
    runner = loaded.runner
    batch = cell.batch(runner.kv_pool.block_size)
    step = lay_out(batch.rows, block_size=runner.kv_pool.block_size, device=DEVICE)
    error, worst = errors_of(runner, step)
    if not (error <= TOLERANCES[DTYPE] and worst <= WORST_TOLERANCES[DTYPE]):
        raise ArithmeticError(f"the logits are off by {error:.1%}, in one row by {worst:.1%}")
    seconds = step_seconds(lambda: runner.run(batch))
    device_seconds = measured(lambda: logits_of(runner, step), in_a_row=10)
    tokens = cell.rows * cell.tokens
    read = DTYPE.itemsize * loaded.weights + cell.rows * cell.context * (
        runner.kv_pool.bytes_per_block / runner.kv_pool.block_size
    )
    # A token of a prompt attends to half of the others on average; only the last needs the head.
    seen = (cell.context - cell.tokens) + (cell.tokens + 1) / 2
    operations = (
        2 * (loaded.weights - loaded.head_weights) * tokens
        + 2 * loaded.head_weights * cell.rows
        + 4 * HEAD_DIM * loaded.heads * seen * tokens
    )
    found = {
        "milliseconds": 1e3 * seconds,
        "device_milliseconds": 1e3 * device_seconds,
        "tokens_per_second": tokens / seconds,
        "share_of_bandwidth": read / seconds / limits.bandwidth,
        "share_of_operations": operations / seconds / limits.operations,
        "error_of_logits": error,
        "worst_error_of_logits": worst,
    }
    print(
        f"{cell.name:>14} {found['milliseconds']:7.2f} {found['device_milliseconds']:7.2f}"
        f" {found['tokens_per_second']:10.0f} {found['share_of_bandwidth']:10.2f}"
        f" {found['share_of_operations']:11.2f}",
        flush=True,
    )
    return found


def engine_figures(runner: ModelRunner, count: int) -> dict[str, float]:
    """Measures a step of a whole engine in both modes, prints the milliseconds, returns them.

    Raises:
        ArithmeticError: a request has a wrong number of tokens.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ENGINE_TURNS):
        for ahead, taken in seconds.items():
            runner._runs_ahead = ahead
            taken.append(engine_seconds(runner, count))
    waiting, ahead = (statistics.median(seconds[way]) for way in (False, True))
    print(
        f"{count:>4} requests, whole engine: {1e3 * waiting:.2f} ms a step waiting,"
        f" {1e3 * ahead:.2f} ahead: {waiting / ahead:.2f} times as fast",
        flush=True,
    )
    return {"milliseconds_waiting": 1e3 * waiting, "milliseconds_ahead": 1e3 * ahead}


def engine_seconds(runner: ModelRunner, count: int) -> float:
    """Seconds per step over the steps in which all requests decode."""
    facts = runner.config_facts
    engine = Engine(
        EngineConfig(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_num_seqs=count,
            max_num_batched_tokens=PROMPT,
            enable_prefix_caching=False,
        ),
        runner,
    )
    for index in range(count):
        prompt = [(7 + 7919 * place + index) % VOCAB_SIZE for place in range(ENGINE_PROMPT)]
        sampling = SamplingParams(max_tokens=ENGINE_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(index), prompt, sampling, arrival_time=0.0))
    times, num_tokens = [], 0
    while engine.has_work():
        outputs = engine.step(time.perf_counter)
        num_tokens += sum(len(output.token_ids) for output in outputs)
        if len(outputs) == count:
            times.append(time.perf_counter())
    if num_tokens != count * ENGINE_TOKENS:
        raise ArithmeticError(f"{num_tokens} tokens instead of {count} times {ENGINE_TOKENS}")
    return (times[-1] - times[0]) / (len(times) - 1)


@torch.inference_mode()
def logits_of(runner: ModelRunner, step: HostStep) -> torch.Tensor:
    """The logits of a step as the runner computes them."""
    return compute_logits(
        step,
        model=runner.model,
        kv_pool=runner.kv_pool,
        backend=runner._backend,
        graphs=runner._graphs,
    )


@torch.inference_mode()
def errors_of(runner: ModelRunner, step: HostStep) -> tuple[float, float]:
    """Median and largest error of a row's logits, relative to the norm of the reference's."""
    found = logits_of(runner, step).float().clone()[:, : runner.model.vocab_size]
    expected = compute_logits(
        step, model=runner.model, kv_pool=runner.kv_pool, backend=ReferenceAttention()
    ).float()[:, : runner.model.vocab_size]
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.median()), float(errors.max())


def step_seconds(run: Callable[[], object]) -> float:
    """Median seconds of a step. It ends with its tokens on the host, so nothing is left running."""
    times = []
    for _ in range(WARM_UP_STEPS + STEPS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP_STEPS:])


def measured_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.ones(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measured(lambda: target.copy_(source))


def measured_operations() -> float:
    """Operations per second of a large product of random matrices."""
    one, other = torch.randn(2, 8192, 8192, dtype=DTYPE, device=DEVICE)
    return 2 * 8192**3 / measured(lambda: one @ other)


def measured(work: Callable[[], object], *, in_a_row: int = 1) -> float:
    """Median seconds of the device for `work`, between two events, after a warm-up.

    Several calls in a row keep the device busy, so that the host's time between them is hidden.
    """
    times = []
    for _ in range(2 + MEASUREMENTS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(in_a_row):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / in_a_row)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
