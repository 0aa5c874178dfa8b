"""Reads settings from the environment and from a TOML file; no unknown name is ignored silently.

Otherwise a worker with a misspelt setting would run a whole night with the default. In the file,
which is ours alone, an unknown name is refused. In the environment it causes a warning only, since
other programs set variables, too: Kubernetes derives some from the names of services, and tests and
tools have theirs.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire.cli.sources import DEFAULT_FILE, ENV_PREFIX, TABLES, setting_of, values_of_variables
from quire.errors import InvalidRequest
from quire.wire.refusals import nearest

#: Prefixes of variables that other parts of Quire read.
FOREIGN_PREFIXES = (
    *("QUIRE_BATCHER_", "QUIRE_CONSOLE_", "QUIRE_EXPORTER_", "QUIRE_GATEWAY_", "QUIRE_NOTIFIER_"),
    *("QUIRE_KERNEL_", "QUIRE_TEST_"),
    # The arguments of vLLM: vLLM itself refuses an unknown one.
    "QUIRE_VLLM_",
)


class ConfigurationError(Exception):
    """Invalid settings; the message names the setting and its source."""


def read_environment(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> dict[str, str]:
    """Setting -> value from our variables, with the same rules as in the `quire` command."""
    try:
        return values_of_variables(environ, known, prefix=prefix)
    except InvalidRequest as error:
        raise ConfigurationError(str(error)) from error


def unknown_variables(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> list[str]:
    """One clause for each unknown variable with our prefix, with a similar name if there is one."""
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


def table_variables(environ: Mapping[str, str], *, prefix: str) -> dict[str, str]:
    """Name -> value of a table of settings that has one variable for each name."""
    return {
        variable.removeprefix(prefix).lower(): text
        for variable, text in environ.items()
        if variable.startswith(prefix)
    }


def table_of(value: Any, *, name: str) -> Any:
    """A table from `NAME=VALUE` texts: a list, as flags have it, or one text with commas.

    Raises:
        ConfigurationError: a text has no name or no value.
    """
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        return value
    pairs = [str(text).partition("=") for text in value]
    for key, equals, _ in pairs:
        if not key.strip() or not equals:
            raise ConfigurationError(f"{name}: must be NAME=VALUE")
    return {key.strip().replace("-", "_"): text.strip() for key, _, text in pairs}


def read_file(
    named: str | Path | None, known: Collection[str], *, table: str, shared: Mapping[str, str]
) -> dict[str, Any]:
    """Setting -> value from the TOML file; empty if none is named and there is no default file.

    `table` is the table of this process. `shared` maps each allowed key before all tables to the
    setting that takes its value.
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
    _refuse_unknown(common, shared, source=str(path))
    _refuse_unknown(own, known, source=f"[{table}] of {path}")
    return {shared[key]: value for key, value in common.items()} | own


def _refuse_unknown(table: Mapping[str, Any], known: Collection[str], *, source: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigurationError(f"unknown key {key!r} in {source}{nearest(key, known)}")
