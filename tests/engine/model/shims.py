"""Parts of the kernels as functions that a test can call, in every variant."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from engine.model.kernels import build
from engine.model.kernels.build import Variant
from tests.engine.model.decoder.test_kernels import runnable


def compile_shim(source: str, variant: Variant, folder: Path) -> ctypes.CDLL:
    """Compile C++ against the kernels' headers, with their flags; skip what cannot run here."""
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    (folder / "shim.cpp").write_text(source)
    library = folder / "shim.so"
    flags = [*build._FLAGS, *variant.options, f"-I{build.SOURCES}"]
    compiler = build._compiler()
    assert compiler is not None
    command = [compiler, *flags, str(folder / "shim.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
