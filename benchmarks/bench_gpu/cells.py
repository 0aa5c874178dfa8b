"""A step to time, its floor, and its figures.

A cell is written as `<decodes>x<context>`, `+<prompts>x<tokens>` (or `+<tokens>` for one prompt),
or both, and then `/<sampling>` if it is not greedy: `64x512`, `+2048`, `256x512+64`,
`256x512/top_p`. Each prompt is computed whole.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bench_gpu.limits import DTYPE, measured
from benchmarks.bench_gpu.shapes import BLOCK_SIZE, BenchedModel
from benchmarks.common.floor import Limits, Work
from engine.batch import Batch, BatchRow
from engine.model.attention.reference import ReferenceAttention
from engine.model.checks.own_attention import TOLERANCES
from engine.model.load.fast_path import WORST_TOLERANCES
from engine.model.run.model_runner import ModelRunner
from engine.model.step import HostStep, compute_logits, lay_out
from engine.sampling_params import SamplingParams

_CELL = re.compile(r"(?:(\d+)x(\d+))?(?:\+(?:(\d+)x)?(\d+))?(?:/([a-z_]+))?")
SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}
WARM_UP_STEPS, STEPS = 4, 20
#: Steps of the device alone in one measurement.
IN_A_ROW = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """One step: decodes at the same context, whole prompts, and how each row samples."""

    name: str
    decodes: int
    context: int
    prompts: int
    prompt_tokens: int
    sampling: str

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """The type of a flag. argparse.ArgumentTypeError if it is no cell."""
        found = _CELL.fullmatch(text)
        sampling = (found and found[5]) or "greedy"
        if found is None or not (found[1] or found[4]) or sampling not in SAMPLINGS:
            known = ", ".join(SAMPLINGS)
            raise argparse.ArgumentTypeError(
                f"{text!r} is not <decodes>x<context>[+[<prompts>x]<tokens>][/<sampling>], as"
                f" 64x512; samplings are {known}"
            )
        prompt_tokens = int(found[4] or 0)
        prompts = int(found[3] or 1) if prompt_tokens else 0
        return cls(text, int(found[1] or 0), int(found[2] or 0), prompts, prompt_tokens, sampling)

    @property
    def num_rows(self) -> int:
        return self.decodes + self.prompts

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.prompts * self.prompt_tokens

    @property
    def num_blocks(self) -> int:
        return sum(len(row.block_ids) for row in self.batch(1).catch_up_rows)

    def batch(self, vocab_size: int) -> Batch:
        """The step as a batch; no two rows share a block."""
        return Batch(step=0, catch_up_rows=tuple(self._rows(vocab_size)))

    def _rows(self, vocab_size: int) -> Iterator[BatchRow]:
        lengths = [(1, self.context)] * self.decodes
        lengths += [(self.prompt_tokens, self.prompt_tokens)] * self.prompts
        first = 0
        for index, (tokens, context) in enumerate(lengths):
            end = first + -(-context // BLOCK_SIZE)
            yield BatchRow(
                request_id=str(index),
                token_ids=[(5 + 7919 * place + index) % vocab_size for place in range(tokens)],
                start=context - tokens,
                block_ids=range(first, end),
                samples=True,
                sampling=SamplingParams(max_tokens=1, seed=index, **SAMPLINGS[self.sampling]),
                prompt_token_ids=[],
                output_token_ids=[],
            )
            first = end

    def read_bytes(self, model: BenchedModel) -> tuple[int, int]:
        """The bytes of the weights, and those of the keys and values of all contexts."""
        num_keys = self.decodes * self.context + self.prompts * self.prompt_tokens
        per_key = model.runner.kv_pool.bytes_per_block // model.runner.kv_pool.block_size
        return DTYPE.itemsize * model.weights, num_keys * per_key

    def operations(self, model: BenchedModel) -> tuple[int, float]:
        """The operations of the products with weights, and those of attention.

        Two for each weight and token, four for each key and channel of a query. A token of a prompt
        sees half of the others on average; only the last token of a row needs the head.
        """
        body = model.weights - model.head_weights
        products = 2 * (body * self.num_tokens + model.head_weights * self.num_rows)
        seen = self.decodes * self.context
        seen += self.prompts * self.prompt_tokens * (self.prompt_tokens + 1) / 2
        return products, 4 * model.head_dims * seen

    def floor_seconds(self, model: BenchedModel, limits: Limits) -> float:
        """The floor of the products with weights, and after it that of attention."""
        parts = zip(self.operations(model), self.read_bytes(model), strict=True)
        return sum(Work(operations, read).seconds(limits) for operations, read in parts)


HEADER = f"{'':18}      ms   device   tokens/s  bandwidth  arithmetic  of floor"


def figures(model: BenchedModel, cell: Cell, limits: Limits) -> dict[str, Any]:
    """Measure a cell.

    Raises:
        ArithmeticError: its logits are wrong; nothing was timed.
    """
    runner, batch = model.runner, cell.batch(model.vocab_size)
    step = lay_out(batch.catch_up_rows, block_size=runner.kv_pool.block_size, device=model.device)
    error, worst = errors_of(runner, step)
    if not (error <= TOLERANCES[DTYPE] and worst <= WORST_TOLERANCES[DTYPE]):
        raise ArithmeticError(f"the logits are off by {error:.1%}, in one row by {worst:.1%}")
    seconds = step_seconds(lambda: runner.run(batch))
    device_seconds = measured(
        lambda: logits_of(runner, step), device=model.device, in_a_row=IN_A_ROW
    )
    read, operations = sum(cell.read_bytes(model)), sum(cell.operations(model))
    return {
        "milliseconds": 1e3 * seconds,
        "device_milliseconds": 1e3 * device_seconds,
        "tokens_per_second": cell.num_tokens / seconds,
        "share_of_bandwidth": read / seconds / limits.bytes_per_second,
        "share_of_operations": operations / seconds / limits.operations_per_second,
        "times_floor": seconds / cell.floor_seconds(model, limits),
        "error_of_logits": error,
        "worst_error_of_logits": worst,
    }


def line_of(cell: Cell, found: dict[str, Any]) -> str:
    return (
        f"{cell.name:>18} {found['milliseconds']:7.2f}  {found['device_milliseconds']:7.2f}"
        f" {found['tokens_per_second']:10.0f} {found['share_of_bandwidth']:10.2f}"
        f" {found['share_of_operations']:11.2f} {found['times_floor']:9.2f}"
    )


@torch.inference_mode()
def logits_of(runner: ModelRunner, step: HostStep) -> torch.Tensor:
    """The logits of a step as the runner computes them."""
    return compute_logits(
        step,
        model=runner.model,
        kv_pool=runner.kv_pool,
        backend=runner._backend,
        multiple=runner._multiple,
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
