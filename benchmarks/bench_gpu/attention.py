"""Attention of decodes alone: how fast keys and values are read, beside a copy of the device.

    python -m benchmarks.bench_gpu.attention [--cells 64x4096,256x512] [--device cuda] [--json FILE]

Three ways, for one layer of the shape 8B, over blocks of 16 tokens in random order:

    triton    the kernels of captured steps, which read the blocks where they are
    gathered  torch's attention over packed rows, after the keys and values have been copied
    sdpa      torch's scaled_dot_product_attention over one copy, made before: without blocks

The share is the bytes of keys and values, each read once, by the time of the step, divided by the
bytes that a copy reads and writes in the same time. Results are compared with the reference first.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.bench_gpu.limits import (
    DTYPE,
    device_parser,
    facts_of,
    is_there,
    measured,
    measured_limits,
    reason_of,
    write,
)
from benchmarks.bench_gpu.shapes import BLOCK_SIZE, SHAPES
from benchmarks.common.arguments import step_shapes
from engine.model.attention.gathered import GatheredAttention
from engine.model.attention.interface import AttentionMetadata, AttentionUnavailable
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import TOLERANCES, worst_error
from engine.model.attention.triton_decode import TritonDecode

#: The shape whose attention is measured, by the type of the device.
SHAPE = {"cuda": "8B", "cpu": "tiny"}
WAYS = ("triton", "gathered", "sdpa")
IN_A_ROW = 10

Attend = Callable[[], torch.Tensor]


class Decodes:
    """Decodes of one layer: `rows` queries at the same context, and their keys and values."""

    def __init__(self, rows: int, context: int, *, shape: str, device: torch.device) -> None:
        sizes = SHAPES[shape]
        self.heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        dim, blocks = sizes["head_dim"], -(-context // BLOCK_SIZE)
        self.scaling = dim**-0.5
        generator = np.random.default_rng(0)
        tables = generator.permutation(rows * blocks).reshape(rows, blocks)
        lengths = np.full(rows, context, dtype=np.int64)
        self.metadata = AttentionMetadata(
            BLOCK_SIZE, np.ones_like(lengths), lengths, tables, device
        )
        torch.manual_seed(0)
        self.query = torch.randn(rows, self.heads, dim, dtype=DTYPE, device=device)
        cached = (2, rows * blocks, kv_heads, BLOCK_SIZE, dim)
        self.keys, self.values = torch.randn(cached, dtype=DTYPE, device=device)

    @property
    def num_bytes(self) -> int:
        """The bytes of the keys and values of all contexts."""
        each = self.keys.shape[1] * self.keys.shape[3] * DTYPE.itemsize
        return 2 * each * int(self.metadata.context_lens.sum())

    def way(self, name: str) -> Attend:
        """One way to attend, planned. AttentionUnavailable."""
        if name == "sdpa":
            return self._dense()
        if name == "triton":
            lengths, tables = (
                torch.from_numpy(array).to(self.metadata.device, torch.int32)
                for array in (self.metadata.context_lens, self.metadata.block_tables)
            )
            longest = int(self.metadata.context_lens.max())
            step = TritonDecode().plan_decodes(lengths, tables, max_context=longest)
        else:
            backends = {"gathered": GatheredAttention, "reference": ReferenceAttention}
            step = backends[name]().prepare(self.metadata)
        return lambda: step(self.query, self.keys, self.values, scaling=self.scaling)

    def _dense(self) -> Attend:
        tables = torch.from_numpy(self.metadata.block_tables).to(self.metadata.device)
        context = int(self.metadata.context_lens[0])

        def copied(cache: torch.Tensor) -> torch.Tensor:
            # [rows, blocks, kv_heads, slots, dim] -> [rows, kv_heads, context, dim]
            each = cache[tables].transpose(1, 2).flatten(2, 3)
            return each[:, :, :context].contiguous()

        keys, values = copied(self.keys), copied(self.values)
        query = self.query.unsqueeze(2)
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, keys, values, scale=self.scaling, enable_gqa=True).squeeze(2)


@torch.inference_mode()
def figures(decodes: Decodes, name: str, bandwidth: float) -> dict[str, float]:
    """Measure one way.

    Raises:
        ArithmeticError: it does not attend as the reference does; nothing was timed.
    """
    attend = decodes.way(name)
    error = worst_error(attend().float(), decodes.way("reference")().float())
    if not error <= TOLERANCES[DTYPE]:
        raise ArithmeticError(f"{name} is off by {error:.1e}")
    seconds = measured(attend, device=decodes.metadata.device, in_a_row=IN_A_ROW)
    return {
        "milliseconds": 1e3 * seconds,
        "bytes_per_second": decodes.num_bytes / seconds,
        "share_of_bandwidth": decodes.num_bytes / seconds / bandwidth,
        "error": error,
    }


def parser() -> argparse.ArgumentParser:
    made = device_parser(__doc__)
    made.add_argument("--cells", type=step_shapes, default="64x4096,256x512,8x4096")
    return made


def main() -> int:
    arguments = parser().parse_args()
    if not is_there(arguments.device):
        return 0
    device = torch.device(arguments.device)
    bandwidth = measured_limits(device).bytes_per_second
    report: dict[str, Any] = facts_of(device) | {"bytes_per_second": bandwidth, "cells": []}
    told, failures = [], 0
    for cell in arguments.cells:
        rows, context = map(int, cell.split("x"))
        decodes = Decodes(rows, context, shape=SHAPE[device.type], device=device)
        for name in WAYS:
            record: dict[str, Any] = {"cell": cell, "way": name}
            try:
                record |= figures(decodes, name, bandwidth)
                told.append(f"{cell} {name} {record['share_of_bandwidth']:.2f}")
                print(
                    f"{cell:>9} {name:>9} {record['bytes_per_second'] / 1e9:8.0f} GB/s", flush=True
                )
            except (AttentionUnavailable, NotImplementedError) as reason:
                record["unavailable"] = reason_of(reason)
                print(f"{cell:>9} {name:>9} {record['unavailable']}", flush=True)
            except Exception as error:  # noqa: BLE001 - the other ways may still work.
                record["error"] = reason_of(error)
                print(f"{cell:>9} {name:>9} {record['error']}", flush=True)
                failures += 1
            report["cells"].append(record)
            report["headline"] = "share of the copy: " + ", ".join(told)
            write(arguments.json, report)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
