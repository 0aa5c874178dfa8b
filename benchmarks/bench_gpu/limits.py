"""The limits of a device: a copy in its memory, and one large product. Needs only torch.

    python -m benchmarks.bench_gpu.limits [--device cuda] [--json FILE]

The copy counts the bytes that it reads and writes. Numbers are random, because products of zeros
take less power, and so less time.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.floor import Limits

DTYPE = torch.bfloat16
DEVICES = ("cuda", "cpu")
#: Bytes of the copy, and rows and columns of the product, by the type of the device.
COPIED_BYTES = {"cuda": 1 << 31, "cpu": 1 << 26}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 256}
WARM_UPS, MEASUREMENTS = 2, 6
PACKAGES = ("torch", "triton", "transformers", "numpy")


def parser() -> argparse.ArgumentParser:
    return device_parser(__doc__)


def device_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags of every program that measures a device."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--device", choices=DEVICES, default="cuda")
    made.add_argument("--json", type=Path, help="the figures so far, while it runs")
    return made


def main() -> int:
    arguments = parser().parse_args()
    if not is_there(arguments.device):
        return 0
    device = torch.device(arguments.device)
    record = facts_of(device)
    # The versions are written first, in case the measurement does not end.
    write(arguments.json, record)
    limits = measured_limits(device)
    record |= limits.rounded()
    record["headline"] = f"{record['device']}, {described(limits)}"
    write(arguments.json, record)
    print(record["headline"])
    return 0


def is_there(device: str) -> bool:
    """Whether torch sees the device; if not, a line says so."""
    if device == "cuda" and not torch.cuda.is_available():
        print(f"bench-gpu: torch {torch.__version__} sees no CUDA device: nothing was measured")
        return False
    return True


def write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def reason_of(error: BaseException) -> str:
    """What an error says, without what libraries add on further lines."""
    told = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {told[0]}"[:300]


def facts_of(device: torch.device) -> dict[str, Any]:
    """The device and the versions with which figures were measured."""
    facts: dict[str, Any] = {"device": "CPU", "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts


def measured_limits(device: torch.device) -> Limits:
    """The operations of a large product, and the bytes of a large copy, per second."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / measured(lambda: target.copy_(source), device=device)
    size = PRODUCT_SIZE[device.type]
    one, other = torch.randn(2, size, size, dtype=DTYPE, device=device)
    return Limits(
        operations_per_second=2 * size**3 / measured(lambda: one @ other, device=device),
        bytes_per_second=bandwidth,
    )


def described(limits: Limits) -> str:
    return (
        f"{limits.bytes_per_second / 1e12:.2f} TB/s,"
        f" {limits.operations_per_second / 1e12:.0f} TFLOP/s in bfloat16"
    )


def measured(work: Callable[[], object], *, device: torch.device, in_a_row: int = 1) -> float:
    """Median seconds of the device for `work`, after a warm-up.

    On CUDA, between two events: several calls in a row keep the device busy, so that the host's
    time between them is hidden.
    """
    times = []
    for _ in range(WARM_UPS + MEASUREMENTS):
        ended = _started(device)
        for _ in range(in_a_row):
            work()
        times.append(ended() / in_a_row)
    return statistics.median(times[WARM_UPS:])


def _started(device: torch.device) -> Callable[[], float]:
    """Start a clock of the device; the result stops it, and gives the seconds between."""
    if device.type != "cuda":
        started = time.perf_counter()
        return lambda: time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()

    def ended() -> float:
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return ended


if __name__ == "__main__":
    sys.exit(main())
