"""What a container's control groups leave a process, in both of their versions."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.model.device.container import available_memory, whole_processors


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


VERSION_1 = {
    "memory/memory.limit_in_bytes": "5000000\n",
    "memory/memory.usage_in_bytes": "3000000\n",
    "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000000\n",
    "cpu/cpu.cfs_quota_us": "350000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
}
VERSION_2 = {
    "memory.max": "5000000\n",
    "memory.current": "3000000\n",
    "memory.stat": "anon 5\ninactive_file 1000000\n",
    "cpu.max": "350000 100000\n",
}
UNLIMITED = (
    VERSION_1 | {"memory/memory.limit_in_bytes": "-1\n", "cpu/cpu.cfs_quota_us": "-1\n"},
    VERSION_2 | {"memory.max": "max\n", "cpu.max": "max 100000\n"},
)


@pytest.mark.parametrize("files", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_a_limit_is_read_in_either_version(files, tmp_path):
    folder = write(tmp_path, files)
    assert available_memory(folder) == 3000000
    assert whole_processors(folder) == 3


@pytest.mark.parametrize("files", UNLIMITED, ids=["version 1", "version 2"])
def test_without_a_limit_nothing_is_said(files, tmp_path):
    folder = write(tmp_path, files)
    assert available_memory(folder) is None
    assert whole_processors(folder) is None


def test_without_control_groups_nothing_is_said(tmp_path):
    assert available_memory(tmp_path) is None
    assert whole_processors(tmp_path) is None


def test_less_than_a_processor_is_one(tmp_path):
    assert whole_processors(write(tmp_path, {"cpu.max": "50000 100000\n"})) == 1
