"""Memory and processor limits of the container that a process runs in. Knows no models.

/proc describes the whole machine. The limits of a container are in its control groups, version 2
or, on older systems, version 1; without a limit the functions return None.
"""

from pathlib import Path
from typing import NamedTuple

#: Where control groups are mounted.
CGROUP = Path("/sys/fs/cgroup")


class _MemoryFiles(NamedTuple):
    """The files of one cgroup version; `droppable` is the statistic of reclaimable memory."""

    limit: str
    used: str
    statistics: str
    droppable: str


#: Version 2 first.
_MEMORY = (
    _MemoryFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _MemoryFiles(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
#: Quota and period in microseconds: in one file in version 2, in two in version 1.
_PROCESSORS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
#: The values that mean "no limit".
_UNLIMITED = frozenset({"max", "-1"})


def available_memory(folder: Path) -> int | None:
    """Bytes left under the limit, reclaimable caches included; None without a limit."""
    for files in _MEMORY:
        try:
            limit = (folder / files.limit).read_text().strip()
            used = int((folder / files.used).read_text())
            statistics = (folder / files.statistics).read_text().splitlines()
        except (OSError, ValueError):
            continue
        if limit in _UNLIMITED:
            return None
        values = dict(line.split() for line in statistics)
        return max(0, int(limit) - used + int(values.get(files.droppable, 0)))
    return None


def whole_processors(folder: Path) -> int | None:
    """The number of processors that the CPU quota allows to be always busy, at least 1.

    None without a limit. With more busy threads, the kernel stops all of them for the rest of each
    period.
    """
    for names in _PROCESSORS:
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return None if quota in _UNLIMITED else max(1, int(quota) // int(period))
    return None
