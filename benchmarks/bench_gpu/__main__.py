"""Steps of common model shapes, compared with the limits of a GPU. Needs a CUDA device.

    python -m benchmarks.bench_gpu [--shapes 0.6B,8B] [--cells 1x512,256x512+64,+2048] [--json FILE]
        [--engine 64,256] [--workloads W1,W2] [--profile 64x512] [--deterministic]

`benchmarks.bench_gpu.cells` says how a step is written. Weights and cache are random. A step is a
whole step of the runner: its tables, the forward pass (captured as a CUDA graph or not), and the
sampler. Before a cell is timed, its logits are compared with those of the reference attention. A
cell that is wrong or fails has the reason in place of figures. The file is written after each cell.

A decode reads each weight once, and each key and value of its contexts. The share of the bandwidth
is these bytes per second of the step, divided by the bytes per second (read and written) of a copy
in the same run. The share of the arithmetic counts two operations per weight and row, and four per
key and channel of a query, divided by the rate of a large matrix product in the same run. The floor
of a step is that of its products, by bytes or by operations, and then that of its attention. The
time of a step is the wall-clock time until its tokens are on the host. The time of the device alone
is printed beside it.

Then a whole engine runs the same requests, in turns: it waits for the tokens of each step, or
launches the next one while one is in flight. With `--deterministic` the model keeps that promise,
and the same requests run alone and together. `--device cpu` is a rehearsal, for the shape `tiny`.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.bench_gpu.cells import HEADER, Cell, figures, line_of
from benchmarks.bench_gpu.engines import same_alone, waiting_and_ahead, workload_figures
from benchmarks.bench_gpu.limits import (
    described,
    device_parser,
    facts_of,
    is_there,
    measured_limits,
    reason_of,
    write,
)
from benchmarks.bench_gpu.profiles import profile_of
from benchmarks.bench_gpu.shapes import SHAPES, BenchedModel, load
from benchmarks.common.arguments import names_of, numbers
from benchmarks.common.floor import Limits

CELLS = "1x512,8x512,64x512,256x512,64x4096,+2048,256x512+64,256x512+1792"
#: W1 and W2 arrive at once. They fit in so many rows, blocks and tokens of a step.
WORKLOADS = ("W1", "W2")
LEAST_ROWS, LEAST_BLOCKS, LEAST_TOKENS = 64, 4096, 2048
#: Requests that run alone and together, with `--deterministic`.
GATED = 6

#: What is measured: a name, what measures it, and the line that is printed of it.
Part = tuple[str, Callable[[], dict[str, Any]], Callable[[dict[str, Any]], str]]


def parser() -> argparse.ArgumentParser:
    made = device_parser(__doc__)
    made.add_argument("--shapes", type=names_of("shape", SHAPES), default="0.6B,8B")
    made.add_argument("--cells", type=cells, default=CELLS)
    made.add_argument("--engine", type=counts, default="64,256", help="requests of a whole engine")
    made.add_argument("--workloads", type=names_of("workload", WORKLOADS), default=())
    made.add_argument("--profile", type=cells, default=())
    made.add_argument("--deterministic", action="store_true")
    return made


def cells(text: str) -> tuple[Cell, ...]:
    """The type of a flag that lists cells, with commas between; none if it is empty."""
    return tuple(Cell.parse(part.strip()) for part in text.split(",") if part)


def counts(text: str) -> tuple[int, ...]:
    """The type of a flag that lists integers from 1; none if it is empty."""
    return numbers(text) if text else ()


def main() -> int:
    arguments = parser().parse_args()
    if not is_there(arguments.device):
        return 0
    device = torch.device(arguments.device)
    limits = measured_limits(device)
    facts = facts_of(device)
    print(f"{facts['device']}, torch {facts['torch']}: {described(limits)}")
    report: dict[str, Any] = facts | limits.rounded() | {"cells": []}
    failures = 0
    for shape in arguments.shapes:
        for record in records_of(shape, arguments, limits):
            failures += "error" in record
            report["cells"].append({"shape": shape} | record)
            report["headline"] = headline(report["cells"])
            write(arguments.json, report)
    return 1 if failures else 0


def records_of(
    shape: str, arguments: argparse.Namespace, limits: Limits
) -> Iterator[dict[str, Any]]:
    """Yields a record for each part of a shape, or a single one if it cannot be loaded."""
    started = time.perf_counter()
    try:
        model = loaded(shape, arguments)
    except Exception as error:  # noqa: BLE001 - another shape may still work.
        print(f"\n{shape}: {reason_of(error)}", flush=True)
        yield {"cell": "load", "error": reason_of(error)}
        return
    seconds, fingerprint = time.perf_counter() - started, model.runner.config_facts.fingerprint
    print(f"\n{shape}: {fingerprint}, loaded in {seconds:.0f} s\n{HEADER}", flush=True)
    yield {"cell": "load", "fingerprint": fingerprint, "seconds": seconds}
    for name, measure, line in parts_of(model, arguments, limits):
        try:
            found = measure()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts may still work.
            print(f"{name:>18}  {reason_of(error)}", flush=True)
            yield {"cell": name, "error": reason_of(error)}
        else:
            print(line(found), flush=True)
            yield {"cell": name} | found
    del model
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()


def loaded(shape: str, arguments: argparse.Namespace) -> BenchedModel:
    """A shape with what its largest part needs."""
    steps = (*arguments.cells, *arguments.profile)
    return load(
        shape,
        device=torch.device(arguments.device),
        max_num_seqs=max(LEAST_ROWS, *arguments.engine, *(one.num_rows for one in steps)),
        max_num_batched_tokens=max(LEAST_TOKENS, *(one.num_tokens for one in steps)),
        num_blocks=max(LEAST_BLOCKS, *(one.num_blocks for one in steps)),
        deterministic=arguments.deterministic,
    )


def parts_of(model: BenchedModel, arguments: argparse.Namespace, limits: Limits) -> Iterator[Part]:
    for cell in arguments.cells:
        yield cell.name, partial(figures, model, cell, limits), partial(line_of, cell)
    for count in arguments.engine:
        name = f"engine of {count}"
        yield name, partial(waiting_and_ahead, model, count), partial(engine_line, name)
    for name in arguments.workloads:
        yield name, partial(workload_figures, model, name), partial(workload_line, name)
    if arguments.deterministic:
        yield "alone", partial(same_alone, model, GATED), alone_line
    for cell in arguments.profile:
        name = f"profile of {cell.name}"
        yield name, partial(profile_of, model, cell), partial(profile_lines, name)


def engine_line(name: str, found: dict[str, Any]) -> str:
    waiting, ahead = found["milliseconds_waiting"], found["milliseconds_ahead"]
    return (
        f"{name:>18}: {waiting:.2f} ms a step waiting, {ahead:.2f} ahead:"
        f" {waiting / ahead:.2f} times as fast"
    )


def workload_line(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name:>18}: {found['output_tokens_per_second']:.0f} tokens/s, first"
        f" {found['first_token_ms']:.1f} ms, then {found['inter_token_ms']:.2f} ms"
    )


def alone_line(found: dict[str, Any]) -> str:
    return f"{found['same_alone']} of {found['requests']} requests are the same alone and together"


def profile_lines(name: str, found: dict[str, Any]) -> str:
    kernels = (
        f"{one['milliseconds']:9.3f} ms {one['calls']:7.1f} x  {one['name']}"
        for one in found["kernels"]
    )
    return "\n".join([f"{name}: {found['milliseconds']:.2f} ms", *kernels])


def headline(records: list[dict[str, Any]]) -> str:
    """All parts in few words: milliseconds of a step if nothing else is said, and what failed."""
    return ", ".join(filter(None, map(short, records)))


def short(record: dict[str, Any]) -> str:
    match record:
        case {"error": _}:
            return f"{record['cell']} FAILED"
        case {"milliseconds": milliseconds}:
            return f"{record['cell']} {milliseconds:.2f}"
        case {"milliseconds_waiting": waiting, "milliseconds_ahead": ahead}:
            return f"{record['cell']} {waiting:.2f} waiting {ahead:.2f} ahead"
        case {"output_tokens_per_second": rate}:
            return f"{record['cell']} {rate:.0f} tokens/s"
        case {"requests": requests, "same_alone": same}:
            return f"{same} of {requests} the same alone"
        case {"fingerprint": fingerprint}:
            return fingerprint.removeprefix("random-")
    return ""


if __name__ == "__main__":
    sys.exit(main())
