"""Parts of the kernels as functions that a test can call, in every variant."""

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path

import pytest

from engine.model.kernels import build
from engine.model.kernels.build import Variant
from tests.engine.model.decoder.test_kernels import runnable


def compile_shim(source: str, variant: Variant) -> ctypes.CDLL:
    """Compile C++ against the kernels' headers, with their flags; skip what cannot run here.

    One for AVX-512 takes seconds, so they are kept beside the kernels, for other checkouts as well:
    a library that was compiled from the same texts in the same way is taken as it is.
    """
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    compiler = build._compiler()
    assert compiler is not None
    flags = [*build._FLAGS, *variant.options]
    headers = [path.read_text() for path in sorted(build.SOURCES.glob("*.h"))]
    way = [source, *headers, *flags, build._run(compiler, "--version")]
    folder = build.cache_folder() / "shims"
    library = folder / f"{hashlib.sha256(repr(way).encode()).hexdigest()}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            text, made = Path(beside, "shim.cpp"), Path(beside, "shim.so")
            text.write_text(source)
            command = [compiler, *flags, f"-I{build.SOURCES}", str(text), "-o", str(made)]
            subprocess.run(command, check=True)
            made.rename(library)
    return ctypes.CDLL(str(library))
