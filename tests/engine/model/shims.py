"""Parts of the kernels as functions that a test can call, in every variant."""

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path

import pytest

from engine.model.kernels import build
from engine.model.kernels.build import Variant
from tests.engine.model.builders import ROOT
from tests.engine.model.decoder.test_kernels import runnable

#: Kept from run to run, as the kernels are: one for AVX-512 takes seconds.
FOLDER = ROOT / "build" / "shims"


def compile_shim(source: str, variant: Variant) -> ctypes.CDLL:
    """Compile C++ against the kernels' headers, with their flags; skip what cannot run here.

    A library that was compiled from the same texts in the same way is taken as it is.
    """
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    compiler = build._compiler()
    assert compiler is not None
    flags = [*build._FLAGS, *variant.options, f"-I{build.SOURCES}"]
    headers = [path.read_text() for path in sorted(build.SOURCES.glob("*.h"))]
    way = [source, *headers, *flags, build._run(compiler, "--version")]
    library = FOLDER / f"{hashlib.sha256(repr(way).encode()).hexdigest()}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            text, made = Path(folder, "shim.cpp"), Path(folder, "shim.so")
            text.write_text(source)
            subprocess.run([compiler, *flags, str(text), "-o", str(made)], check=True)
            made.rename(library)
    return ctypes.CDLL(str(library))
