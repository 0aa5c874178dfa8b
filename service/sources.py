"""Reads settings from the environment and from a TOML file, and lets no unknown name pass silently.

A misspelt setting that is silently ignored runs a whole night with its default. In the file, which
is ours alone, it is refused. The environment is written by others as well (Kubernetes makes
variables out of the names of services, tests and tools have theirs), so there it is warned about.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire.refusals import nearest

#: Every variable of ours starts so; a name with this prefix that nobody knows may be a mistake.
ENV_PREFIX = "QUIRE_"
#: Added to a variable's name, it names a file that holds the value: QUIRE_REDIS_PASSWORD_FILE.
FILE_SUFFIX = "_FILE"
#: Variables of these prefixes are read by other parts of Quire.
FOREIGN_PREFIXES = ("QUIRE_EXPORTER_", "QUIRE_GATEWAY_", "QUIRE_KERNEL_", "QUIRE_TEST_")
#: Read when no file is named and it exists in the working directory.
DEFAULT_FILE = "quire.toml"
#: The tables of the file, one for each part of Quire.
TABLES = frozenset({"client", "exporter", "gateway", "worker"})
#: Keys of the file that may also stand above all tables.
SHARED_KEYS = frozenset({"redis_url", "queue", "shards", "log_level", "log_format"})
#: Bytes of a file named by a `*_FILE` variable; a longer one is a mistake.
MAX_SECRET_BYTES = 65_536


class ConfigurationError(Exception):
    """The settings cannot be right; the message names the setting and where it came from."""


def read_environment(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> dict[str, str]:
    """Values of our variables by setting; `QUIRE_X_FILE` names a file that holds X's value."""
    values: dict[str, str] = {}
    for variable, text in _ours(environ, prefix=prefix).items():
        name, from_file = _setting_of(variable, known, prefix=prefix)
        if name not in known:
            continue
        if name in values:
            plain = prefix + name.upper()
            raise ConfigurationError(f"{plain} and {plain}{FILE_SUFFIX} are both set")
        values[name] = _read_secret(variable, text) if from_file else text
    return values


def unknown_variables(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> list[str]:
    """One clause for each variable that looks like ours and is not, with what it may have meant."""
    names = [prefix + key.upper() for key in known]
    return [
        f"unknown variable {variable}{nearest(variable, names)}"
        for variable in sorted(_ours(environ, prefix=prefix))
        if _setting_of(variable, known, prefix=prefix)[0] not in known
    ]


def _ours(environ: Mapping[str, str], *, prefix: str) -> dict[str, str]:
    foreign = tuple(other for other in FOREIGN_PREFIXES if other != prefix)
    return {
        variable: text
        for variable, text in environ.items()
        if variable.startswith(prefix) and not variable.startswith(foreign)
    }


def _setting_of(variable: str, known: Collection[str], *, prefix: str) -> tuple[str, bool]:
    """The setting a variable is about, and whether it names a file."""
    name = variable.removeprefix(prefix).lower()
    if name in known or not variable.endswith(FILE_SUFFIX):
        return name, False
    return name.removesuffix(FILE_SUFFIX.lower()), True


def read_file(
    named: str | Path | None, known: Collection[str], *, table: str, shared: Mapping[str, str]
) -> dict[str, Any]:
    """Our values in the TOML file; empty if none is named and there is no default file.

    `table` is ours, and `shared` says which of our settings a key above all tables gives.
    """
    path = Path(named) if named else Path(DEFAULT_FILE)
    if not named and not path.exists():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    own = content.pop(table, {})
    if not isinstance(own, dict):
        raise ConfigurationError(f"{table} in {path} is not a table")
    common = {key: value for key, value in content.items() if key not in TABLES}
    _refuse_unknown(common, shared, place=str(path))
    _refuse_unknown(own, known, place=f"[{table}] of {path}")
    return {shared[key]: value for key, value in common.items()} | own


def _refuse_unknown(table: Mapping[str, Any], known: Collection[str], *, place: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigurationError(f"unknown key {key!r} in {place}{nearest(key, known)}")


def _read_secret(variable: str, path: str) -> str:
    try:
        content = Path(path).read_bytes()[: MAX_SECRET_BYTES + 1]
        text = content.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{variable}: cannot read the file: {error}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigurationError(f"{variable}: the file is longer than {MAX_SECRET_BYTES} bytes")
    return text
