"""How much memory is free on the device, and the share of it that a KV pool takes by default."""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import ModelRefused
from engine.model.device.container import CGROUP, available_memory

#: Share of the free memory that a pool takes by default. Other processes also need a CPU's memory.
CPU_MEMORY_SHARE = 0.4
CUDA_MEMORY_SHARE = 0.9

MEMINFO = Path("/proc/meminfo")


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    Raises:
        ModelRefused: the system does not report it; the size must be configured.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # The container's limit counts too: with more than that, the process would be killed.
    available = [_meminfo_available(MEMINFO), available_memory(CGROUP)]
    known = [value for value in available if value is not None]
    if not known:
        raise ModelRefused(
            "this system does not report how much memory is free: set kv_cache_memory_bytes"
        )
    return min(known)


def release_memory(device: torch.device | str) -> None:
    """Free unreferenced memory; a dropped model has reference cycles, which need a collection."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # Only the C library of GNU has it.
        # What was fused and packed leaves free memory behind, which the library would keep.
        ctypes.CDLL(None).malloc_trim(0)
    # By its name: torch does not know every device of vLLM.
    if str(device).startswith("cuda"):
        # Memory in torch's cache would otherwise count as used.
        torch.cuda.empty_cache()


def peak_bytes_of(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `run` takes at once of a CUDA device, in addition to those before it."""
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def memory_share(device: torch.device) -> float:
    """The share of the free memory that a pool takes by default."""
    return CUDA_MEMORY_SHARE if device.type == "cuda" else CPU_MEMORY_SHARE


def _meminfo_available(path: Path) -> int | None:
    """MemAvailable: bytes available without swapping, reclaimable caches included."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
