"""The adapters of a worker: where it finds them at its start, and which one a claim is to run with.

What is in their files is the engine's to read and to judge.
"""

from collections.abc import Collection
from pathlib import Path

from engine.errors import ModelRefused
from quire.adapters import ADAPTER_PATTERN, adapter_of, is_adapter_name
from quire.errors import InvalidRequest
from quire.protocol import GenerationRequest

#: What makes a folder an adapter, in PEFT's format.
CONFIG_FILE = "adapter_config.json"

#: The most adapters of a worker, which tells their names twice per lease to whoever looks.
MAX_ADAPTERS = 512

#: Parts the engine from the adapter in the fingerprint of both; neither has one in it.
_SEPARATOR = " "


def adapters_in(folder: Path | None) -> dict[str, Path]:
    """The adapters in a folder by name: its subfolders that are one, but for hidden ones.

    Raises:
        ModelRefused: there is no such folder, or what is in it cannot be meant.
    """
    if folder is None:
        return {}
    try:
        found = sorted(path for path in folder.iterdir() if (path / CONFIG_FILE).is_file())
        is_adapter = (folder / CONFIG_FILE).is_file()
    except OSError as error:
        raise ModelRefused(f"adapters: cannot read {folder}: {error.strerror}") from error
    if is_adapter:
        message = "is an adapter itself; name the folder that it lies in"
        raise ModelRefused(f"adapters: {folder} {message}")
    # Where a volume is changed under a process that reads it, the versions are hidden folders.
    named = {path.name: path for path in found if not path.name.startswith(".")}
    for name in named:
        if not is_adapter_name(name):
            message = (
                f"an adapter is called by its folder's name, which must match {ADAPTER_PATTERN}"
            )
            raise ModelRefused(f"adapters: {folder / name}: {message}")
    if len(named) > MAX_ADAPTERS:
        raise ModelRefused(
            f"adapters: {folder} holds {len(named)}, and {MAX_ADAPTERS} are the most"
        )
    return named


def announced_adapters(folder: Path | None) -> dict[str, str]:
    """What the registry is told of adapters that are not read yet: their names, and no revision.

    Else nobody could be let in for one of them while the only worker that has it starts.
    """
    try:
        return dict.fromkeys(adapters_in(folder), "")
    except ModelRefused:
        # Whoever reads them says so, and the worker ends.
        return {}


def known_adapter(request: GenerationRequest, *, model: str, known: Collection[str]) -> str | None:
    """The adapter that a request will run with; None where it will not run, too."""
    try:
        asked = adapter_of(request.body, model=model)
    except InvalidRequest:
        return None
    return asked.name if asked is not None and asked.name in known else None


def fingerprint_with(engine: str, adapter: str, *, revision: str) -> str:
    """The fingerprint of an engine that generates with an adapter."""
    return f"{engine}{_SEPARATOR}{adapter}={revision}"


def is_same_adapter(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same revision of the same adapter, or both of none."""
    return _adapter_in(one) == _adapter_in(other)


def _adapter_in(fingerprint: str) -> str | None:
    """Name and revision; None where it is that of an engine alone, which may be anybody's."""
    name, is_adapter, revision = fingerprint.rpartition(_SEPARATOR)[2].partition("=")
    return f"{name}={revision}" if is_adapter and is_adapter_name(name) else None
