"""Reads settings from the environment and from a TOML file, and lets no unknown name pass silently.

A misspelt setting that is silently ignored runs a whole night with its default. In the file, which
is ours alone, it is refused. The environment is written by others as well (Kubernetes makes
variables out of the names of services, tests and tools have theirs), so there it is warned about.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire.cli.sources import DEFAULT_FILE, ENV_PREFIX, TABLES, setting_of, values_of_variables
from quire.errors import InvalidRequest
from quire.wire.refusals import nearest

#: Variables of these prefixes are read by other parts of Quire.
FOREIGN_PREFIXES = ("QUIRE_EXPORTER_", "QUIRE_GATEWAY_", "QUIRE_KERNEL_", "QUIRE_TEST_")


class ConfigurationError(Exception):
    """The settings cannot be right; the message names the setting and where it came from."""


def read_environment(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> dict[str, str]:
    """Values of our variables by setting, as the `quire` command reads its own."""
    try:
        return values_of_variables(environ, known, prefix=prefix)
    except InvalidRequest as error:
        raise ConfigurationError(str(error)) from error


def unknown_variables(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> list[str]:
    """One clause for each variable that looks like ours and is not, with what it may have meant."""
    names = [prefix + key.upper() for key in known]
    return [
        f"unknown variable {variable}{nearest(variable, names)}"
        for variable in sorted(_ours(environ, prefix=prefix))
        if setting_of(variable, known, prefix=prefix)[0] not in known
    ]


def _ours(environ: Mapping[str, str], *, prefix: str) -> dict[str, str]:
    foreign = tuple(other for other in FOREIGN_PREFIXES if other != prefix)
    return {
        variable: text
        for variable, text in environ.items()
        if variable.startswith(prefix) and not variable.startswith(foreign)
    }


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
