"""Free memory as the system tells it, the container's own limit included."""

from pathlib import Path

import pytest
import torch

from engine.errors import ModelRefused
from engine.model.device import memory


def write_cgroup(folder: Path, *, limit: str, current: int, inactive_file: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nshmem 1\n")
    return folder


def point_at(monkeypatch, *, meminfo: Path, cgroup: Path) -> None:
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", cgroup)


def write_meminfo(folder: Path, kilobytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {kilobytes} kB\n")
    return path


def test_the_smaller_of_the_machine_s_and_the_container_s_memory_is_free(tmp_path, monkeypatch):
    meminfo = write_meminfo(tmp_path, 8000)
    cgroup = write_cgroup(tmp_path, limit="5000000", current=3000000, inactive_file=1000000)
    point_at(monkeypatch, meminfo=meminfo, cgroup=cgroup)
    assert memory.free_memory_bytes(torch.device("cpu")) == 3000000
    write_meminfo(tmp_path, 1000)
    assert memory.free_memory_bytes(torch.device("cpu")) == 1000 * 1024


def test_a_container_without_a_limit_has_the_machine_s_memory(tmp_path, monkeypatch):
    cgroup = write_cgroup(tmp_path, limit="max", current=5, inactive_file=0)
    point_at(monkeypatch, meminfo=write_meminfo(tmp_path, 8000), cgroup=cgroup)
    assert memory.free_memory_bytes(torch.device("cpu")) == 8000 * 1024


def test_a_container_over_its_limit_has_nothing_free(tmp_path, monkeypatch):
    cgroup = write_cgroup(tmp_path, limit="1000", current=2000, inactive_file=10)
    point_at(monkeypatch, meminfo=write_meminfo(tmp_path, 8000), cgroup=cgroup)
    assert memory.free_memory_bytes(torch.device("cpu")) == 0


def test_a_system_that_says_nothing_wants_to_be_told(tmp_path, monkeypatch):
    point_at(monkeypatch, meminfo=tmp_path / "none", cgroup=tmp_path / "none")
    with pytest.raises(ModelRefused, match="does not report how much memory is free"):
        memory.free_memory_bytes(torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "on_cuda"),
    [("cuda", 1), ("cuda:1", 1), (torch.device("cuda"), 1), ("cpu", 0), ("a name of vLLM's", 0)],
)
def test_only_cuda_has_memory_in_a_cache_of_torch_whatever_other_devices_there_are(
    device, on_cuda, monkeypatch
):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(device))
    memory.release_memory(device)
    assert len(emptied) == on_cuda
