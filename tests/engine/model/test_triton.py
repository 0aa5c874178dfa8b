"""The Triton kernels without a device: in Triton's interpreter, and compiled for one.

The interpreter shows what they compute, the compiler that Hopper's machine code can be made of
them, with the shared memory there is. That both agree is for `tests/gpu` to show.
"""

import importlib.util
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    CHECKED_DECODES,
    TOLERANCES,
    DecodesOnly,
    self_check,
    worst_error,
)
from engine.model.attention.triton_decode import TritonDecode
from engine.model.device.launcher import Launcher
from tests.engine.model.attention.test_attention import make_scene
from tests.engine.model.builders import ROOT
from tests.engine.model.device.test_cuda_path import PLAIN

#: Around the ends of tiles, of runs and of what sixteen shortest runs hold.
CONTEXTS = (1, 2, 63, 64, 65, 127, 128, 129, 700, 2047, 2048, 2049, 2600)
#: Query heads, key heads, width.
SHAPES = ((4, 2, 16), (6, 2, 80), (3, 1, 96), (4, 4, 128), (14, 2, 64), (10, 1, 40))
WINDOWS = (None, 1, 9, 64, 130, 4096)
#: Bytes of shared memory that a program can have on Hopper.
SHARED_MEMORY = 227 * 1024

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def interpret(call: str, *, of: str = "test_triton") -> None:
    """In a process of its own: Triton decides at its import whether it interprets."""
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter cannot loop over tensors with numpy 2.4 and later")
    code = f"import torch\nfrom tests.engine.model import {of}\n{of}.{call}\n"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernels_pass_the_check_that_they_will_be_put_to(dtype):
    """The interpreter knows no bfloat16."""
    interpret(f"check(torch.{dtype})")


def check(dtype: torch.dtype) -> None:
    for block_size in (16, 256):
        self_check(
            DecodesOnly(TritonDecode()),
            dtype=dtype,
            block_size=block_size,
            needs=PLAIN,
            rows=CHECKED_DECODES,
        )


@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_widths_windows_and_ragged_contexts_of_every_kind(shape):
    """Blocks of nobody and what lies behind a context are NaN, and table entries there are -1."""
    interpret(f"compare({shape})")


def compare(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    for index, window in enumerate(WINDOWS):
        dtype = (torch.float32, torch.float16)[index % 2]
        scene = make_scene(
            [(1, context) for context in CONTEXTS],
            heads=heads,
            kv_heads=kv_heads,
            key_dim=dim,
            value_dim=dim,
            block_size=(16, 256, 1)[index % 3],
            dtype=dtype,
            seed=index,
        )
        found, expected = (
            scene.attend(backend, sliding_window=window).float()
            for backend in (DecodesOnly(TritonDecode()), ReferenceAttention())
        )
        error = worst_error(found, expected)
        assert error <= TOLERANCES[dtype], (shape, window, dtype, error)


class CompiledForHopper:
    """In the place of a kernel: every launch compiles what it would have run."""

    def __init__(self, kernel, compiled: list) -> None:
        self._kernel = kernel
        self._compiled = compiled

    def __getitem__(self, grid):
        def launch(*arguments, num_warps: int = 4, **constants) -> None:
            import triton
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource

            names = list(inspect.signature(self._kernel.fn).parameters)
            assert set(constants) == set(names[len(arguments) :])
            signature = dict.fromkeys(names, "constexpr")
            signature |= dict(zip(names, map(type_of, arguments), strict=False))
            source = ASTSource(self._kernel, signature, constexprs=constants)
            self._compiled.append(
                triton.compile(
                    source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
                )
            )

        return launch


def compiled_for_hopper(kernels) -> SimpleNamespace:
    """All kernels of a module, and beside them what was compiled."""
    compiled: list = []
    found = {name: getattr(kernels, name) for name in kernels.__all__}
    error = found.pop("TritonError")
    made = {name: CompiledForHopper(kernel, compiled) for name, kernel in found.items()}
    return SimpleNamespace(TritonError=error, compiled=compiled, **made)


def type_of(argument) -> str:
    names = {
        torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
        torch.int64: "i64",
    }  # fmt: skip
    if isinstance(argument, torch.Tensor):
        return "*" + names[argument.dtype]
    return {int: "i32", float: "fp32"}[type(argument)]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(32, 8, 128), (32, 8, 80), (8, 1, 256)], ids=str)
def test_the_kernels_compile_for_hopper(shape, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heads, kv_heads, dim = shape
    decode = TritonDecode()
    kernels = compiled_for_hopper(decode._launch._kernels)
    decode._launch = Launcher(kernels)
    cache = torch.zeros(3, kv_heads, 16, dim, dtype=dtype)
    numbers = torch.ones(2, dtype=torch.int32)
    decode.plan_decodes(numbers, torch.zeros(2, 1, dtype=torch.int32), max_context=16)(
        torch.zeros(2, heads, dim, dtype=dtype), cache, cache, scaling=0.1, sliding_window=7
    )
    assert len(kernels.compiled) == 2
    for compiled in kernels.compiled:
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_MEMORY
