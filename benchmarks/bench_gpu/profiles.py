"""Which kernels the time of one step goes to, as torch's profiler says."""

from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_gpu.cells import WARM_UP_STEPS, Cell
from benchmarks.bench_gpu.shapes import BenchedModel

STEPS = 5
#: The kernels that are listed, those with the most time first.
MOST = 14


def profile_of(model: BenchedModel, cell: Cell) -> dict[str, Any]:
    """Milliseconds of a step by kernel: of the device, or of operators where there is only a CPU.

    `kernels` has the name, the calls of a step and their milliseconds.
    """
    runner, batch = model.runner, cell.batch(model.vocab_size)
    for _ in range(WARM_UP_STEPS):
        runner.run(batch)
    on_device = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            runner.run(batch)
    which = "self_device_time_total" if on_device else "self_cpu_time_total"
    # Operators of the host also count the kernels that they launch, which are listed themselves.
    wanted = DeviceType.CUDA if on_device else DeviceType.CPU
    each = [
        (event.key, event.count / STEPS, getattr(event, which) / 1e3 / STEPS)
        for event in found.key_averages()
        if event.device_type == wanted and not event.is_user_annotation
    ]
    each.sort(key=lambda one: -one[2])
    return {
        "milliseconds": sum(one[2] for one in each),
        "kernels": [
            {"name": name[:100], "calls": calls, "milliseconds": milliseconds}
            for name, calls, milliseconds in each[:MOST]
        ],
    }
