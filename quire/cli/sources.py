"""Where the command finds its queue when no flag says so: `QUIRE_*` variables, then `quire.toml`.

The names are the worker's, so that both can be given the same environment and the same file, and
both read variables by what is here. In the file a key stands in the table `[client]`, in
`[worker]`, or above all tables. A password has no flag, because `ps` shows flags: it is
QUIRE_REDIS_PASSWORD, or in the file that QUIRE_REDIS_PASSWORD_FILE names; so is any other setting
in that of a variable with this ending.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.errors import InvalidRequest
from quire.wire.refusals import nearest

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

#: The tables of the file, one for each part of Quire.
TABLES = frozenset({"client", "exporter", "gateway", "worker"})

#: Keys of the file that may also stand above all tables.
SHARED_KEYS = frozenset({"redis_url", "queue", "shards", "log_level", "log_format"})

#: A name as like as this to one of KEYS is that one misspelt; no other setting of Quire is.
MISSPELT = 0.8

#: Bytes of a file that a variable names; a longer one is a mistake.
MAX_SECRET_BYTES = 65_536


def known_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What variables and file say, as text; a key nobody has set is missing.

    InvalidRequest for a file that cannot be read, a key of `[client]` or above all tables that
    nobody knows, or a setting that two variables give.
    """
    found = {key: str(value) for key, value in _file(environ).items()}
    return found | values_of_variables(environ, KEYS)


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """One clause for each variable that was probably meant for a setting of the command.

    Other parts of Quire have variables of their own, which are not known here.
    """
    found = []
    foreign = tuple(f"{ENV_PREFIX}{table.upper()}_" for table in TABLES)
    for variable in sorted(environ):
        if variable.startswith(foreign):
            continue
        name, from_file = setting_of(variable, KEYS, prefix=ENV_PREFIX)
        if variable.startswith(ENV_PREFIX) and name not in KEYS:
            for key in difflib.get_close_matches(name, KEYS, n=1, cutoff=MISSPELT):
                meant = f"{ENV_PREFIX}{key.upper()}{FILE_SUFFIX if from_file else ''}"
                found.append(f"unknown variable {variable}; did you mean {meant}?")
    return found


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
    from quire.transport.sentinel import parts_of

    parts = parts_of(url)
    if password is None or parts.password:
        return url
    user, _, hosts = parts.netloc.rpartition("@")
    user = user.removesuffix(":")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{hosts}").geturl()


def without_password(url: str) -> str:
    """The url as it may be shown."""
    from quire.transport.sentinel import parts_of

    parts = parts_of(url)
    options = parts.query.split("&")
    shown = [option for option in options if not option.partition("=")[0].endswith("password")]
    if shown != options:
        parts = parts._replace(query="&".join(shown))
        url = parts.geturl()
    if parts.password is None:
        return url
    user, _, hosts = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return parts._replace(netloc=f"{name}@{hosts}" if name else hosts).geturl()


def _file(environ: Mapping[str, str]) -> dict[str, Any]:
    tables = _tables(environ)
    client = tables.get("client", {})
    path = environ.get("QUIRE_CONFIG_FILE") or DEFAULT_FILE
    _refuse_unknown(set(tables) - TABLES, SHARED_KEYS, place=path)
    _refuse_unknown(client, KEYS, place=f"[client] of {path}")
    # What the worker was told of the queue holds for its clients, too, in the worker's order.
    shared = {**tables, **tables.get("worker", {}), **client}
    return {key: shared[key] for key in KEYS if key in shared}


def _refuse_unknown(names: Iterable[str], known: Collection[str], *, place: str) -> None:
    for name in sorted(names):
        if name not in known:
            raise InvalidRequest(place, f"unknown key {name!r}{nearest(name, known)}")


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
