"""Where the command finds its queue when no flag says so: `QUIRE_*` variables, then `quire.toml`.

The names are the worker's, so that both can be given the same environment and the same file, and
both read variables by what is here. In the file a key stands in the table `[client]`, in
`[worker]`, or above all tables. A password has no flag, because `ps` shows flags: it is
QUIRE_REDIS_PASSWORD, or in the file that QUIRE_REDIS_PASSWORD_FILE names; so is any other setting
in that of a variable with this ending.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.errors import InvalidRequest

#: Read when QUIRE_CONFIG_FILE names no other and it exists in the working directory.
DEFAULT_FILE = "quire.toml"

#: Every variable of ours starts so.
ENV_PREFIX = "QUIRE_"

#: Added to a variable's name, it names a file that holds the value: QUIRE_REDIS_PASSWORD_FILE.
FILE_SUFFIX = "_FILE"

#: What a command wants to know of its queue.
KEYS = (
    "redis_url", "redis_password", "queue", "shards", "max_queue_seconds", "retention_seconds",
)  # fmt: skip

#: Bytes of a file that a variable names; a longer one is a mistake.
MAX_SECRET_BYTES = 65_536


def known_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What variables and file say, as text; a key nobody has set is missing.

    InvalidRequest for a file that cannot be read, a key of `[client]` that nobody knows, or a
    setting that two variables give.
    """
    found = {key: str(value) for key, value in _file(environ).items()}
    return found | values_of_variables(environ, KEYS)


def known_model(environ: Mapping[str, str]) -> str | None:
    """The model that a worker is told to load by variables and file; None if by neither.

    InvalidRequest as for `known_settings`.
    """
    told = values_of_variables(environ, ("model",))
    if "model" not in told:
        told = _tables(environ).get("worker", {})
    return str(told["model"]) if "model" in told else None


def values_of_variables(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> dict[str, str]:
    """Values of variables by setting; `QUIRE_X_FILE` names a file that holds X's value.

    InvalidRequest where both are set, or the file cannot be read.
    """
    values: dict[str, str] = {}
    for variable, text in environ.items():
        name, from_file = setting_of(variable, known, prefix=prefix)
        if not variable.startswith(prefix) or name not in known:
            continue
        if name in values:
            plain = prefix + name.upper()
            raise InvalidRequest(plain, f"both it and {plain}{FILE_SUFFIX} are set")
        values[name] = _secret(variable, Path(text)) if from_file else text
    return values


def setting_of(variable: str, known: Collection[str], *, prefix: str) -> tuple[str, bool]:
    """The setting a variable is about, and whether it names a file."""
    name = variable.removeprefix(prefix).lower()
    if name in known or not variable.endswith(FILE_SUFFIX):
        return name, False
    return name.removesuffix(FILE_SUFFIX.lower()), True


def with_password(url: str, password: str | None) -> str:
    """The url with the password in it, unless it has one of its own."""
    # Only now: `--help` need not wait for the client of Redis.
    from quire.sentinel import parts_of

    parts = parts_of(url)
    if password is None or parts.password:
        return url
    user, _, hosts = parts.netloc.rpartition("@")
    user = user.removesuffix(":")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{hosts}").geturl()


def _file(environ: Mapping[str, str]) -> dict[str, Any]:
    tables = _tables(environ)
    client = tables.get("client", {})
    if unknown := sorted(set(client) - set(KEYS)):
        path = environ.get("QUIRE_CONFIG_FILE") or DEFAULT_FILE
        raise InvalidRequest(path, f"[client] has no setting {', '.join(unknown)}")
    # What the worker was told of the queue holds for its clients, too, in the worker's order.
    shared = {**tables, **tables.get("worker", {}), **client}
    return {key: shared[key] for key in KEYS if key in shared}


def _tables(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the file holds; nothing if none is named and the usual one is not there."""
    named = environ.get("QUIRE_CONFIG_FILE")
    path = Path(named or DEFAULT_FILE)
    if not named and not path.is_file():
        return {}
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(str(path), f"cannot be read: {error}") from error
    for name in ("client", "worker"):
        if not isinstance(tables.get(name, {}), dict):
            raise InvalidRequest(str(path), f"{name} is not a table")
    return tables


def _secret(name: str, path: Path) -> str:
    """What stands in the file that the variable `name` names. InvalidRequest."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
        text = content.decode().rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise InvalidRequest(name, f"cannot read the file: {error}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise InvalidRequest(name, f"the file is longer than {MAX_SECRET_BYTES} bytes")
    return text
