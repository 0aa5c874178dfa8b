"""Where Triton cannot run its kernels, the next form serves, and a sentence in the log says why."""

import subprocess
import sys

import pytest
import torch

from engine.model import attention
from engine.model.attention import choose_decode
from engine.model.checks.probe import probe
from engine.model.device.launcher import Launcher
from engine.model.kernels.build import KernelsUnavailable
from engine.model.load import fast_path
from engine.model.load.fast_path import choose_model
from engine.model.wide.loader import load_model
from tests.engine.model.builders import save_model
from tests.engine.model.decoders import FAMILIES
from tests.engine.model.device.test_cuda_path import PLAIN
from tests.engine.model.run.test_captured_steps import MaskedDecode


class TritonError(Exception):
    """The base of what Triton's compiler raises."""


#: What a launch of Triton ended in without something that it needs.
MISSING = [
    TritonError("out of resource: shared memory"),
    PermissionError(13, "Permission denied", "/nobody/.triton"),
    subprocess.CalledProcessError(1, ["gcc"]),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"),
    ImportError("cuda_utils.so: undefined symbol"),
    RuntimeError("0 active drivers ([]). There should only be one."),
]


class Kernels:
    """Kernels whose launches end in an error, after some that compute nothing."""

    TritonError = TritonError

    def __init__(self, error: Exception, *, launches: int = 0) -> None:
        self._error = error
        self._launches = launches

    def __getattr__(self, name: str):
        return self

    def __getitem__(self, grid):
        def launch(*arguments, **constants) -> None:
            if self._launches == 0:
                raise self._error
            self._launches -= 1

        return launch


def replace_module(monkeypatch, package: str, name: str, replacement: object) -> None:
    """Whether Triton is installed, without which the module cannot be imported, or not."""
    monkeypatch.setitem(sys.modules, f"{package}.{name}", replacement)
    monkeypatch.setattr(sys.modules[package], name, replacement, raising=False)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


@pytest.mark.parametrize("error", MISSING, ids=first_line)
def test_without_what_triton_needs_captured_steps_get_the_next_attention(
    error, monkeypatch, caplog
):
    replace_module(monkeypatch, "engine.model.attention", "triton_kernels", Kernels(error))
    monkeypatch.setattr(attention, "DECODES", {"cpu": (attention.TritonDecode, MaskedDecode)})
    found = choose_decode(dtype=torch.float32, device="cpu", block_size=16, needs=PLAIN)
    assert isinstance(found, MaskedDecode)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(f": Triton cannot run its kernels here: {first_line(error)}")


@pytest.mark.parametrize("error", MISSING, ids=first_line)
def test_without_what_triton_needs_the_torch_form_serves(error, tmp_path, monkeypatch, caplog):
    replace_module(monkeypatch, "engine.model.decoder", "fused_kernels", Kernels(error))
    forms = fast_path._forms
    monkeypatch.setattr(fast_path, "_forms", lambda kind, **options: forms("cuda", **options))
    save_model(FAMILIES["llama"], tmp_path)
    served = probe(load_model(tmp_path, dtype="float32").model, max_model_len=256)
    assert choose_model(served).name == "decoder-torch"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(f": Triton cannot run its kernels here: {first_line(error)}")


def test_an_error_after_the_first_launch_of_a_kernel_is_one_of_the_device():
    """What only a new specialisation meets stays a refusal."""
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    launch = Launcher(Kernels(error, launches=1))
    launch("activate", (1,))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch("activate", (1,))
    with pytest.raises(KernelsUnavailable, match="illegal memory access"):
        launch("store_heads", (1,))
    launch = Launcher(Kernels(PermissionError(13, "no room"), launches=1))
    launch("activate", (1,))
    with pytest.raises(KernelsUnavailable, match="no room"):
        launch("activate", (1,))


def test_a_mistake_of_ours_in_a_launch_is_no_refusal():
    with pytest.raises(TypeError, match="unexpected"):
        Launcher(Kernels(TypeError("unexpected keyword")))("activate", (1,))
