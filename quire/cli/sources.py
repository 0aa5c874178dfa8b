"""Settings of the command without flags: `QUIRE_*` variables first, then `quire.toml`.

The names are the worker's, so that both can use the same environment and the same file; both read
variables with this module. In the file a key is in the table `[client]`, in `[worker]`, or before
all tables. A password has no flag, because `ps` shows flags: set QUIRE_REDIS_PASSWORD, or
QUIRE_REDIS_PASSWORD_FILE with the name of a file that contains it. Every other variable can also
be set by a file in this way.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.errors import InvalidRequest
from quire.wire.refusals import nearest

#: The file in the working directory that is read unless QUIRE_CONFIG_FILE names another one.
DEFAULT_FILE = "quire.toml"

#: The prefix of all our variables.
ENV_PREFIX = "QUIRE_"

#: The suffix of a variable that names a file with the value, as in QUIRE_REDIS_PASSWORD_FILE.
FILE_SUFFIX = "_FILE"

#: The settings that the command uses.
KEYS = (
    "redis_url", "redis_password", "queue", "shards", "max_queue_seconds", "retention_seconds",
)  # fmt: skip

#: The tables of the file, one for each part of Quire.
TABLES = frozenset({"batcher", "client", "console", "exporter", "gateway", "notifier", "worker"})

#: Keys of the file that may also be set before all tables.
SHARED_KEYS = frozenset({"redis_url", "queue", "shards", "log_level", "log_format"})

#: Prefixes of variables that other parts of Quire read. vLLM itself refuses an unknown argument.
FOREIGN_PREFIXES = (
    *("QUIRE_BATCHER_", "QUIRE_CONSOLE_", "QUIRE_EXPORTER_", "QUIRE_GATEWAY_", "QUIRE_NOTIFIER_"),
    *("QUIRE_KERNEL_", "QUIRE_TEST_", "QUIRE_VLLM_"),
)

#: From this similarity to a known name, an unknown one counts as misspelt. No other setting of
#: Quire is so similar to one that the command has, or that all processes have.
MISSPELT_SIMILARITY = 0.8

#: The largest file that a variable may name, in bytes; a larger one is a mistake.
MAX_SECRET_BYTES = 65_536


def known_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings from variables and file, as text, without those that are not set.

    InvalidRequest for a file that cannot be read, an unknown key in `[client]` or before all
    tables, or a setting that two variables set.
    """
    found = {key: str(value) for key, value in _file(environ).items()}
    return found | values_of_variables(environ, KEYS)


def unknown_variables(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> Iterator[str]:
    """One clause for each unknown variable with our prefix, with a similar name if there is one."""
    names = [prefix + key.upper() for key in known]
    for variable, _, from_file in _unknown(environ, known, prefix=prefix):
        files = [name + FILE_SUFFIX for name in names] if from_file else []
        yield f"unknown variable {variable}{nearest(variable, names + files)}"


def misspelt_variables(environ: Mapping[str, str], known: Collection[str] = KEYS) -> Iterator[str]:
    """One clause for each variable that is probably one of the known ones, misspelt.

    Not each unknown variable: other parts of Quire have variables that are not known here.
    """
    for variable, name, from_file in _unknown(environ, known, prefix=ENV_PREFIX):
        for key in difflib.get_close_matches(name, known, n=1, cutoff=MISSPELT_SIMILARITY):
            meant = f"{ENV_PREFIX}{key.upper()}{FILE_SUFFIX if from_file else ''}"
            yield f"unknown variable {variable}; did you mean {meant}?"


def _unknown(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str
) -> Iterator[tuple[str, str, bool]]:
    """The variables that may be meant for us, with what `_setting_of` makes of each."""
    foreign = tuple(other for other in FOREIGN_PREFIXES if other != prefix)
    for variable in sorted(environ):
        name, from_file = _setting_of(variable, known, prefix=prefix)
        if variable.startswith(prefix) and not variable.startswith(foreign) and name not in known:
            yield variable, name, from_file


def program_setting(
    environ: Mapping[str, str], name: str, *, program: str = "worker"
) -> str | None:
    """A setting of a worker, or of another program; None if neither variables nor file set it.

    InvalidRequest as for `known_settings`.
    """
    prefix = ENV_PREFIX if program == "worker" else f"{ENV_PREFIX}{program.upper()}_"
    found: Mapping[str, Any] = values_of_variables(environ, (name,), prefix=prefix)
    if name not in found:
        found = read_tables(environ.get("QUIRE_CONFIG_FILE")).get(program, {})
    return str(found[name]) if name in found else None


def values_of_variables(
    environ: Mapping[str, str], known: Collection[str], *, prefix: str = ENV_PREFIX
) -> dict[str, str]:
    """Setting -> value from variables. `QUIRE_X_FILE` names a file that contains the value of X.

    InvalidRequest if both are set, or if the file cannot be read.
    """
    values: dict[str, str] = {}
    for variable, text in environ.items():
        name, from_file = _setting_of(variable, known, prefix=prefix)
        if not variable.startswith(prefix) or name not in known:
            continue
        if name in values:
            plain = prefix + name.upper()
            raise InvalidRequest(plain, f"cannot be combined with {plain}{FILE_SUFFIX}")
        values[name] = _secret(variable, Path(text)) if from_file else text
    return values


def _setting_of(variable: str, known: Collection[str], *, prefix: str) -> tuple[str, bool]:
    """The setting of a variable, and whether the variable names a file with the value."""
    name = variable.removeprefix(prefix).lower()
    if name in known or not variable.endswith(FILE_SUFFIX):
        return name, False
    return name.removesuffix(FILE_SUFFIX.lower()), True


def with_password(url: str, password: str | None) -> str:
    """The url with this password, unless it already has one."""
    # Imported here, so that `--help` does not wait for the import of the Redis client.
    from quire.transport.urls import parts_of

    parts = parts_of(url)
    if password is None or parts.password:
        return url
    user, _, hosts = parts.netloc.rpartition("@")
    user = user.removesuffix(":")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{hosts}").geturl()


def without_password(url: str) -> str:
    """The url without passwords, for output."""
    from quire.transport.urls import parts_of

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
    path = environ.get("QUIRE_CONFIG_FILE")
    tables = read_tables(path)
    client = tables.get("client", {})
    refuse_unknown_keys(client, KEYS, source=f"[client] of {path or DEFAULT_FILE}")
    # The worker's settings of the queue also apply to clients, unless `[client]` sets them.
    shared = {**tables, **tables.get("worker", {}), **client}
    return {key: shared[key] for key in KEYS if key in shared}


def read_tables(named: str | Path | None) -> dict[str, Any]:
    """The content of the file: TABLES, and SHARED_KEYS before them.

    Empty if no file is named and the default one does not exist. InvalidRequest if it cannot be
    read, or has anything else.
    """
    path = Path(named or DEFAULT_FILE)
    if not named and not path.exists():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(str(path), f"cannot read the file: {error}") from error
    for name in TABLES:
        if not isinstance(tables.get(name, {}), dict):
            raise InvalidRequest(str(path), f"{name} is not a table")
    refuse_unknown_keys(set(tables) - TABLES, SHARED_KEYS, source=str(path))
    return tables


def refuse_unknown_keys(names: Iterable[str], known: Collection[str], *, source: str) -> None:
    """InvalidRequest for a key that is not known, with a similar one if there is one."""
    for name in sorted(names):
        if name not in known:
            raise InvalidRequest(source, f"unknown key {name!r}{nearest(name, known)}")


def _secret(name: str, path: Path) -> str:
    """The text of the file that the variable `name` names. InvalidRequest if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
        text = content.decode().rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise InvalidRequest(name, f"cannot read the file: {error}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise InvalidRequest(name, f"the file is longer than {MAX_SECRET_BYTES} bytes")
    return text
