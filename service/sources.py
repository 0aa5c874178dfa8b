"""Reads settings from the environment and from a TOML file, and refuses every name nobody knows.

A misspelt setting that is silently ignored runs a whole night with its default.
"""

import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

#: Every variable of ours starts so; a name with this prefix that nobody knows is a mistake.
ENV_PREFIX = "QUIRE_"
#: Added to a variable's name, it names a file that holds the value: QUIRE_REDIS_PASSWORD_FILE.
FILE_SUFFIX = "_FILE"
#: Variables of these prefixes belong to other parts of Quire, which check them themselves.
FOREIGN_PREFIXES = (
    "QUIRE_BENCH_",
    "QUIRE_CLIENT_",
    "QUIRE_DEMO_",
    "QUIRE_EXPORTER_",
    "QUIRE_GATEWAY_",
    "QUIRE_KERNEL_",
    "QUIRE_TEST_",
)
#: Read when no file is named and it exists in the working directory.
DEFAULT_FILE = "quire.toml"
#: The tables of the file, one for each part of Quire.
TABLES = frozenset({"client", "exporter", "gateway", "worker"})
#: Keys of the file that may also stand above all tables.
SHARED_KEYS = frozenset({"redis_url", "queue", "log_level", "log_format"})
#: Bytes of a file named by a `*_FILE` variable; a longer one is a mistake.
MAX_SECRET_BYTES = 65_536


class ConfigurationError(Exception):
    """The settings cannot be right; the message names the setting and where it came from."""


def read_environment(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> dict[str, str]:
    """Values of our variables by setting; `QUIRE_X_FILE` names a file that holds X's value."""
    values: dict[str, str] = {}
    foreign = tuple(other for other in FOREIGN_PREFIXES if other != prefix)
    for variable, text in environ.items():
        if not variable.startswith(prefix) or variable.startswith(foreign):
            continue
        name = variable.removeprefix(prefix).lower()
        from_file = name not in known and variable.endswith(FILE_SUFFIX)
        if from_file:
            name = name.removesuffix(FILE_SUFFIX.lower())
        if name not in known:
            hint = _hint(variable, [prefix + key.upper() for key in known])
            raise ConfigurationError(f"unknown variable {variable}{hint}")
        if name in values:
            plain = prefix + name.upper()
            raise ConfigurationError(f"{plain} and {plain}{FILE_SUFFIX} are both set")
        values[name] = _read_secret(variable, text) if from_file else text
    return values


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
            raise ConfigurationError(f"unknown key {key!r} in {place}{_hint(key, known)}")


def _read_secret(variable: str, path: str) -> str:
    try:
        content = Path(path).read_bytes()[: MAX_SECRET_BYTES + 1]
        text = content.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{variable}: cannot read the file: {error}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigurationError(f"{variable}: the file is longer than {MAX_SECRET_BYTES} bytes")
    return text


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
