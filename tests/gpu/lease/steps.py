"""The steps of a run on a lent device, in the order of their value, and the limit of each.

`{json}` is the file that a step writes while it goes on, `{small}` and `{large}` are shapes of
`benchmarks.bench_gpu`. All limits together are six minutes.
"""

import os
from dataclasses import dataclass

from tests.gpu.__main__ import pytest_arguments

#: Processes of `tests/gpu`: they compile kernels on the host, and share one device.
PROCESSES = min(12, os.cpu_count() or 1)
#: Shapes by the type of the device. A CPU rehearses the same steps with a tiny one.
SHAPES = {
    "cuda": {"small": "0.6B", "large": "8B"},
    "cpu": {"small": "tiny", "large": "tiny"},
}
DECODES = "1x512,8x512,64x512,256x512"
MIXED = "256x512+64,256x512+1792"
SAMPLED = "256x512/temperature,256x512/top_p"
NOTHING = ("--cells", "", "--engine", "")
COMMON = ("--device", "{device}", "--json", "{json}")


@dataclass(frozen=True, slots=True)
class Step:
    """One process: its arguments to Python, and the seconds after which it is killed."""

    name: str
    seconds: float
    arguments: tuple[str, ...]


def bench(*arguments: str, module: str = "benchmarks.bench_gpu") -> tuple[str, ...]:
    return ("-m", module, *COMMON, *arguments)


STEPS = (
    Step("limits", 15, bench(module="benchmarks.bench_gpu.limits")),
    Step(
        "tests",
        75,
        (
            *("-m", "pytest", *pytest_arguments(), "-n", str(PROCESSES), "--dist", "worksteal"),
            *("-p", "tests.gpu.lease.outcomes", "--outcomes", "{json}"),
        ),
    ),
    Step("takeover", 45, bench("--wheels", "{wheels}", module="tests.gpu.lease.takeover")),
    Step(
        "0.6B",
        70,
        bench(
            *("--shapes", "{small}", "--workloads", "W1,W2"),
            *("--cells", f"{DECODES},{MIXED},64x4096,+2048,+4x512,{SAMPLED}"),
        ),
    ),
    Step("attention", 30, bench(module="benchmarks.bench_gpu.attention")),
    Step("8B", 90, bench("--shapes", "{large}", "--cells", f"{DECODES},{MIXED},64x4096,+2048")),
    Step(
        "profile",
        20,
        bench(*("--shapes", "{large}", *NOTHING), "--profile", "256x512,256x512+64"),
    ),
    Step(
        "deterministic",
        15,
        bench("--shapes", "{small}", "--cells", "64x512", "--engine", "", "--deterministic"),
    ),
)
