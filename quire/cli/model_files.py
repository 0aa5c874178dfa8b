"""Checks a model by its files, before anything reads its weights."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.cli.findings import Finding, Verdict
from quire.cli.programs import EMBEDDED_MODEL, environment_of_programs
from quire.version import install_hint

#: What a worker needs beside its own libraries to read a GGUF file.
GGUF_LIBRARIES = ("gguf",)
#: The longest time that reading the size of a state may take, with loading torch.
STATE_SECONDS = 120.0


def examined_model(name: str | None, *, advice: str = "set --model or QUIRE_MODEL") -> Finding:
    """Whether the folder or file has what a worker needs. Loads nothing, and asks no hub.

    `advice` is what to do if nothing has the name.
    """
    if name == "":
        # For instance from an empty shell variable. A worker refuses it, too.
        return Finding("model", Verdict.FAIL, "its name is empty", advice)
    folder = Path(name) if name else EMBEDDED_MODEL
    if folder.suffix.lower() == ".gguf":
        return _gguf_file(folder, advice)
    if folder.is_file():
        detail = f"{folder} is a file, and its name does not end with .gguf"
        return Finding("model", Verdict.FAIL, detail, advice)
    if not folder.is_dir():
        if name and may_be_of_hub(name):
            return Finding("model", Verdict.WARN, f"{name} is not a folder here; a hub name?")
        verdict = Verdict.FAIL if name else Verdict.WARN
        return Finding("model", verdict, f"no folder {folder}", advice)
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        missing.append("tokenizer.json")
    if missing:
        return Finding("model", Verdict.FAIL, f"{folder} lacks {', '.join(missing)}")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Finding("model", Verdict.OK, f"{folder}, {size / 1e6:.1f} MB of weights")


def _gguf_file(file: Path, advice: str) -> Finding:
    """Whether it is a GGUF file, and whether what a worker needs to read it is installed."""
    try:
        with file.open("rb") as stream:
            begins_well = stream.read(4) == b"GGUF"
            size = stream.seek(0, 2)
    except OSError as error:
        detail = f"{file} cannot be read: {error.strerror or error}"
        return Finding("model", Verdict.FAIL, detail, advice)
    if not begins_well:
        advice = "download it again; a folder needs no .gguf at the end of its name"
        return Finding("model", Verdict.FAIL, f"{file} is not a GGUF file", advice)
    detail = f"{file}, {size / 1e6:.1f} MB"
    missing = [name for name in GGUF_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        advice = f"only workers need it, with {install_hint('gguf')}"
        return Finding("model", Verdict.WARN, f"{detail}; {missing[0]} is not installed", advice)
    # What follows is the engine's to read, and may be gigabytes.
    unread = "only its first bytes were read: a worker finds out whether the rest is there"
    return Finding("model", Verdict.OK, detail, unread)


def examined_state(name: str | None) -> Iterator[Finding]:
    """The size of a model's recurrent state, if it has one; only of a folder.

    In a separate process, which makes the model of its config, without weights.
    """
    folder = Path(name) if name else EMBEDDED_MODEL
    if not (folder / "config.json").is_file():
        return
    check = "recurrent state"
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "service.worker.model.state_size", str(folder)],
            capture_output=True,
            text=True,
            timeout=STATE_SECONDS,
            check=True,
            env=environment_of_programs(os.environ),
        )
    except subprocess.TimeoutExpired:
        yield Finding(check, Verdict.WARN, f"no size known after {STATE_SECONDS:.0f} s")
        return
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(check, Verdict.WARN, f"no size known: {last}")
        return
    size = int(done.stdout.splitlines()[-1])
    if size:
        detail = f"a running request takes {2 * size} bytes, two buffers of {size}"
        advice = "a worker has so much for each of max_num_seqs: lower that if they are too large"
        yield Finding(check, Verdict.OK, detail, advice)


def may_be_of_hub(name: str) -> bool:
    """Whether it is an `<owner>/<model>` that a worker would download from the hub.

    Not if a folder named `<owner>` exists here: then the model's name is probably misspelt.
    """
    owner, *rest = Path(name).parts
    return len(rest) == 1 and not owner.startswith(("/", ".", "~")) and not Path(owner).is_dir()
