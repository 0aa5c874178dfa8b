"""How much memory a KV pool may take. Knows what is free on the device, not what it is for."""

import gc
from pathlib import Path

import torch

from engine.errors import ModelRefused
from engine.model.device.container import CGROUP, available_memory

#: Share of the free memory a pool takes by default. A CPU's memory belongs to the whole machine.
CPU_MEMORY_SHARE = 0.4
CUDA_MEMORY_SHARE = 0.9

MEMINFO = Path("/proc/meminfo")


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    Raises:
        ModelRefused: the system does not say; the caller must be told a size.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # The machine's alone would be too much in a smaller container, and the process would be killed.
    available = [_meminfo_available(MEMINFO), available_memory(CGROUP)]
    known = [value for value in available if value is not None]
    if not known:
        raise ModelRefused(
            "this system does not say how much memory is free: set kv_cache_memory_bytes"
        )
    return min(known)


def release_memory(device: torch.device) -> None:
    """Give back what nobody refers to: a loaded model is freed only after its cycles are found."""
    gc.collect()
    if device.type == "cuda":
        # What torch keeps for its next allocation counts as taken otherwise.
        torch.cuda.empty_cache()


def memory_share(device: torch.device) -> float:
    """The part of the free memory that a pool takes when nobody says how much."""
    return CUDA_MEMORY_SHARE if device.type == "cuda" else CPU_MEMORY_SHARE


def _meminfo_available(path: Path) -> int | None:
    """MemAvailable: what can be had without swapping, caches that can be dropped included."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
