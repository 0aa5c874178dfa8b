"""What Triton itself raises where something that it needs is missing is a refusal in one sentence.

Each is raised by Triton at its first launch; none needs a device.
"""

import subprocess

import pytest
import torch
from triton.backends.nvidia.driver import CudaDriver, libcuda_dirs, library_dirs
from triton.runtime import driver

from engine.model.decoder import fused_kernels
from engine.model.device.launcher import Launcher
from engine.model.kernels.build import KernelsUnavailable
from tests.kernels.compiling import CHIPS, NoDevice


@pytest.fixture(autouse=True)
def _first_launch(monkeypatch):
    """Triton has not looked for anything yet."""
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(driver, "_active", None)
    fused_kernels.activate.device_caches.clear()
    for found in (libcuda_dirs, library_dirs):
        found.cache_clear()
    yield
    fused_kernels.activate.device_caches.clear()


def refusal() -> str:
    numbers = torch.zeros(1, 32)
    with pytest.raises(KernelsUnavailable) as raised:
        Launcher(fused_kernels)("activate", (1, 1), numbers, numbers, SIZE=16, TILE=16)
    (line,) = str(raised.value).splitlines()
    return line


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(CudaDriver, "is_active", staticmethod(lambda: False))
    assert "0 active drivers" in refusal()


def test_without_libcuda(monkeypatch):
    monkeypatch.setattr(CudaDriver, "is_active", staticmethod(lambda: True))
    # What the linker knows of libraries.
    monkeypatch.setattr(subprocess, "check_output", lambda command: b"")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "libcuda.so cannot found" in refusal()


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "Failed to find C compiler" in refusal()


def test_without_a_folder_for_what_is_compiled(monkeypatch, tmp_path):
    driver.set_active(NoDevice(CHIPS[0]))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    assert "Not a directory" in refusal()
