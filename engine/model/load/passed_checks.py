"""Remembers which form of a model has passed its check on this machine.

The check at load computes with the same numbers every time. So it is left out if it has been passed
by the same form, built from the same sources by the same compiler, of files with the same bytes,
with the same code of this package, libraries and type of processor. Any other of these is another
key. Knows no arithmetic.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import engine
from engine.model.kernels.build import (
    CPUINFO,
    KernelsUnavailable,
    best_variant,
    cache_folder,
    library_path,
)
from engine.model.wide.gguf_loader import is_gguf_name
from engine.model.wide.loader import LoadedModel

SUFFIX = ".passed"
#: The most files that are kept. The oldest goes first.
MAX_FILES = 256
#: The most bytes of the name of a form.
MAX_NAME_BYTES = 256


class PassedChecks:
    """What is remembered of one model, in a file to which no other user can write."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @classmethod
    def of(
        cls, loaded: LoadedModel, adapters: Mapping[str, Path], *settings: object
    ) -> "PassedChecks":
        """What a check of a model with some settings is remembered as.

        It is not remembered for a model that cannot be known to be the same one at the next start.
        """
        is_file = is_gguf_name(loaded.source)
        # To hash a folder whose weights are not quantized may take longer than to check it.
        if adapters or not (is_file or loaded.stored) or loaded.model.device.type != "cpu":
            return NOTHING
        try:
            kernels, folder = library_path(best_variant()).name, cache_folder()
            facts = (loaded.fingerprint, *map(str, settings), kernels, _processor(), _sources())
            # The fingerprint of a folder covers samples of its weights only.
            facts += (np.__version__, "" if is_file else _content(loaded.source))
        except (KernelsUnavailable, OSError):
            return NOTHING
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        return cls(folder / f"{key[:32]}{SUFFIX}")

    @property
    def form(self) -> str | None:
        """The name of the form that has passed; None for none."""
        if self._file is None:
            return None
        try:
            with self._file.open(encoding="utf-8") as stream:
                return stream.read(MAX_NAME_BYTES) or None
        except (OSError, UnicodeDecodeError):
            return None

    def remember(self, form: str) -> None:
        """Without effect if the file cannot be written: the next start checks again."""
        if self._file is None or self.form == form:
            return
        with contextlib.suppress(OSError):
            folder = self._file.parent
            handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(form)
            # Atomic: another process reads the whole name or none.
            Path(part).replace(self._file)
            files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-MAX_FILES]:
                file.unlink(missing_ok=True)


#: Nothing has passed, and nothing is remembered.
NOTHING = PassedChecks(None)


def _content(folder: Path) -> str:
    """The digests of all files that may have weights, or say what they mean."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json"))

    def digest(file: Path) -> str:
        with file.open("rb") as stream:
            return f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}"

    # A digest is computed without the lock of the interpreter.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return "\n".join(threads.map(digest, files))


def _processor() -> str:
    """The name and the features of the processor. Another one may round differently."""
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))


def _sources() -> str:
    """A digest of the engine's modules, which all may take part in the check."""
    root = Path(engine.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
