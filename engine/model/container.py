"""What the container that a process runs in leaves it. Knows neither models nor what it is for.

/proc speaks of the machine. The limits of a container are in its control groups, version 2 or, on
older systems, version 1; where there are none, nothing is said.
"""

from pathlib import Path
from typing import NamedTuple

#: Where control groups are mounted.
CGROUP = Path("/sys/fs/cgroup")


class _MemoryFiles(NamedTuple):
    """Where a version says what may be taken, what is taken, and what of that can be dropped."""

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
#: Microseconds of all processors together in each period, and the period: in one file, then in two.
_PROCESSORS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
#: What stands for no limit.
_UNLIMITED = frozenset({"max", "-1"})


def available_memory(folder: Path) -> int | None:
    """Bytes that the limit leaves, caches that can be dropped included; None without a limit."""
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
    """Processors that may be busy all the time, at least one; None without a limit.

    More threads than that are all stopped for the rest of each period, wherever they are.
    """
    for names in _PROCESSORS:
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return None if quota in _UNLIMITED else max(1, int(quota) // int(period))
    return None
