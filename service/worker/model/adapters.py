"""The adapters of a worker: finds their folders at start, and the adapter of each claim.

The engine reads and checks the files of adapters.
"""

from collections.abc import Collection
from pathlib import Path

import structlog

from engine.errors import ModelRefused
from quire.errors import InvalidRequest
from quire.wire.adapters import ADAPTER_PATTERN, adapter_of, is_adapter_name
from quire.wire.protocol import GenerationRequest

_log = structlog.get_logger("service.worker.model")

#: A folder with this file is an adapter, in PEFT's format.
CONFIG_FILE = "adapter_config.json"

#: The most adapters of a worker. It writes all their names to the registry twice per lease.
MAX_ADAPTERS = 512

#: Separates engine and adapter in a fingerprint; neither contains it.
_SEPARATOR = " "

#: Ends the fingerprint of a chat whose prompt is another one than in earlier versions. No adapter's
#: revision is equal.
_CHAT_MARK = "chat=text"


def adapters_in(folder: Path | None) -> dict[str, Path]:
    """The adapters in a folder by name: its subfolders with a CONFIG_FILE, except hidden ones.

    Raises:
        ModelRefused: there is no such folder, it is an adapter itself, or a name is not allowed.
    """
    if folder is None:
        return {}
    try:
        found = sorted(path for path in folder.iterdir() if (path / CONFIG_FILE).is_file())
        is_adapter = (folder / CONFIG_FILE).is_file()
    except OSError as error:
        raise ModelRefused(f"adapters: cannot read {folder}: {error.strerror}") from error
    if is_adapter:
        message = "is an adapter itself; name the folder that contains it"
        raise ModelRefused(f"adapters: {folder} {message}")
    # Hidden folders are skipped: Kubernetes keeps the versions of a mounted volume in them.
    named = {path.name: path for path in found if not path.name.startswith(".")}
    for name in named:
        if not is_adapter_name(name):
            message = f"an adapter has the name of its folder, which must match {ADAPTER_PATTERN}"
            raise ModelRefused(f"adapters: {folder / name}: {message}")
    if len(named) > MAX_ADAPTERS:
        raise ModelRefused(
            f"adapters: {folder} has {len(named)} adapters, and the limit is {MAX_ADAPTERS}"
        )
    return named


def announced_adapters(folder: Path | None) -> dict[str, str]:
    """The names of adapters before they are loaded, for the registry; each has revision "".

    Without them a gateway would refuse calls for these adapters while their only worker starts.
    """
    try:
        return dict.fromkeys(adapters_in(folder), "")
    except ModelRefused:
        # Loading the model raises the same error again, and that ends the worker.
        return {}


def known_adapter(request: GenerationRequest, *, model: str, known: Collection[str]) -> str | None:
    """The adapter that a request will run with; None without one, or if it will be refused."""
    try:
        adapter = adapter_of(request.body, model=model)
    except InvalidRequest:
        return None
    return adapter.name if adapter is not None and adapter.name in known else None


def fingerprint_with(engine: str, adapter: str, *, revision: str) -> str:
    """The fingerprint of an engine that generates with an adapter."""
    return f"{engine}{_SEPARATOR}{adapter}={revision}"


def find_adapters(folder: Path | None) -> dict[str, Path]:
    """`adapters_in`; a folder that has none is a reason for a warning."""
    found = adapters_in(folder)
    if folder is not None and not found:
        _log.warning("the folder of adapters has no adapter", folder=str(folder))
    return found


def is_same_adapter(one: str, other: str) -> bool:
    """Whether two fingerprints have the same revision of the same adapter, or both have none."""
    return _adapter_in(one) == _adapter_in(other)


def with_chat_mark(fingerprint: str) -> str:
    """The fingerprint for a chat of which earlier versions make another prompt; see ChatPrompt.

    They read the mark as another adapter, and therefore end such a request and do not continue it.
    """
    return f"{fingerprint}{_SEPARATOR}{_CHAT_MARK}"


def is_same_chat(one: str, other: str) -> bool:
    """Whether two fingerprints are of chats that were encoded by the same rule."""
    return _without_chat_mark(one)[1] == _without_chat_mark(other)[1]


def _without_chat_mark(fingerprint: str) -> tuple[str, bool]:
    rest = fingerprint.removesuffix(f"{_SEPARATOR}{_CHAT_MARK}")
    return rest, rest != fingerprint


def _adapter_in(fingerprint: str) -> str | None:
    """`<adapter>=<revision>` of a fingerprint; None if it has no adapter."""
    engine, _ = _without_chat_mark(fingerprint)
    name, is_adapter, revision = engine.rpartition(_SEPARATOR)[2].partition("=")
    return f"{name}={revision}" if is_adapter and is_adapter_name(name) else None
