"""Reads settings: flags win over variables, these over `quire.toml`, and that over defaults.

Defines only the settings that name the file and Redis; the others are defined in
`service.settings.config`, `service.exporter.settings` and `service.gateway.settings`. This module
does not import torch, so that `--help` prints at once.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from quire.cli.sources import DEFAULT_FILE, ENV_PREFIX, SHARED_KEYS, with_password
from quire.cli.usage import Parser
from quire.wire.arguments import MAX_SECONDS, MIN_KEPT_SECONDS
from quire.wire.refusals import reason_of
from service.settings.sources import (
    ConfigurationError,
    read_environment,
    read_file,
    unknown_variables,
)

#: The name of a queue. It has no braces, because a Redis key has it inside a hash tag.
QUEUE_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

#: The reason for MIN_KEPT_SECONDS.
NOTHING_KEPT = "Redis counts whole milliseconds, so less would be 0"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
LOG_LEVEL_TEXT = "Least severe event that is logged."
LOG_FORMAT_TEXT = "`auto` is console on a terminal and JSON elsewhere."

_Settings = TypeVar("_Settings", bound="ProcessSettings")


def setting(section: str, description: str, *, default: Any, **constraints: Any) -> Any:
    """One field of a process' settings, with its section in docs/reference/configuration.md."""
    extra: JsonDict = {"section": section}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class ProcessSettings(BaseSettings):
    """The settings that all processes of the service have. Frozen; unknown names are refused.

    A subclass defines `file_table`, its table of the file, and `shared`: which of its settings
    takes the value of each key before all tables.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX)
    file_table: ClassVar[str]
    shared: ClassVar[Mapping[str, str]] = {key: key for key in SHARED_KEYS}
    #: Duration -> the smallest value with which it works, and the reason.
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "max_queue_seconds": (MIN_KEPT_SECONDS, NOTHING_KEPT),
        "retention_seconds": (MIN_KEPT_SECONDS, NOTHING_KEPT),
    }
    #: Duration -> the largest useful value, and the reason; all others have only MAX_SECONDS.
    most_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {}

    #: Sets of settings by name, for a process with a setting `preset`.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    config_file: Path | None = setting(
        "Files", f"TOML file to read; unset: `{DEFAULT_FILE}` if it exists here.", default=None
    )

    redis_url: str = setting(
        "Queue",
        "URL of Redis: `redis://`, `rediss://` (TLS, with options such as `?ssl_ca_certs=<file>`), "
        "`unix://`, or through sentinels `redis+sentinel://host:port,.../service/0` "
        "(`rediss+sentinel://` if Redis uses TLS, with the same options). A cluster by some of its "
        "nodes: `redis+cluster://host:port,.../` or `rediss+cluster://`.",
        default="redis://127.0.0.1:6379/0",
        repr=False,
    )
    redis_password: SecretStr | None = setting(
        "Queue",
        "Password, if it is not part of the URL. It has no flag, because `ps` shows flags.",
        default=None,
    )

    @field_validator("redis_url")
    @classmethod
    def _is_valid_url(cls, value: str) -> str:
        # Imported here, so that `--help` does not wait for the import of the Redis client.
        from quire.transport.connection import (
            UnknownScheme,
            UnusableFile,
            connect,
            longest_block_of,
        )

        try:
            longest_block_of(connect(value))
        except (UnknownScheme, UnusableFile):
            raise
        except ValueError:
            # None of these messages contains the value, because it may contain a password.
            raise ValueError("its host, port, path or an option is invalid") from None
        return value

    @field_validator("*")
    @classmethod
    def _is_utf8(cls, value: Any) -> Any:
        # Python reads a variable that is not UTF-8 as a text that cannot be encoded again, which
        # would fail later, for instance in the worker registry.
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("must be a text in UTF-8") from None
        return value

    @field_validator("http_host", check_fields=False)
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        # A socket would treat an empty one as all addresses of the machine.
        if not value.strip():
            raise ValueError("must be an address (0.0.0.0 for all addresses of this machine)")
        return value

    @field_validator("*")
    @classmethod
    def _is_within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if value is None:
            return value
        if name.endswith("_seconds") and value > MAX_SECONDS:
            raise ValueError(f"must be at most {MAX_SECONDS} seconds")
        most, reason = cls.most_seconds.get(name, (None, ""))
        if most is not None and value > most:
            raise ValueError(f"must be at most {most:g} seconds: {reason}")
        least, reason = cls.least_seconds.get(name, (None, ""))
        if least is not None and value < least:
            raise ValueError(f"must be at least {least:g} seconds: {reason}")
        return value

    @property
    def connection_url(self) -> str:
        """The Redis URL with `redis_password`, unless the URL has a password."""
        secret = self.redis_password
        # The `quire` command uses the same function, so both use the same server in one
        # environment.
        return with_password(self.redis_url, secret.get_secret_value() if secret else None)

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Setting -> value from our variables."""
        return read_environment(environ, cls.model_fields)

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """A clause for each variable that has our prefix and is not one of ours."""
        return unknown_variables(environ, cls.model_fields, prefix=cls.model_config["env_prefix"])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use the flags, which are passed as arguments, and our own strict readers."""
        # Pydantic's readers ignore unknown names.
        del env_settings, dotenv_settings, file_secret_settings
        return tuple(
            InitSettingsSource(settings_cls, init_kwargs=values)
            for values in cls.values_by_source(init_settings()).values()
        )

    @classmethod
    def values_by_source(cls, flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What each source says, the one that wins first: flag, variable, file, preset.

        ConfigurationError where a source cannot be read or has an unknown name.
        """
        variables = dict(cls.read_variables(os.environ))
        named = flags.get("config_file") or variables.get("config_file")
        file = read_file(named, cls.model_fields, table=cls.file_table, shared=cls.shared)
        sources = {"flag": dict(flags), "variable": variables, "file": file}
        chosen = [values["preset"] for values in sources.values() if "preset" in values]
        # A name that is no preset is refused by the field.
        preset = cls.presets.get(str(chosen[0]), {}) if chosen else {}
        return sources | {"preset": dict(preset)}


def load(
    kind: type[_Settings], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> _Settings:
    """The settings of this process, from `argv`, `os.environ` and the file.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    flags = vars(parser.parse_args(argv))
    try:
        return kind(**flags)
    except ValidationError as error:
        raise ConfigurationError(_describe(error)) from error


def split_list(value: Any) -> Any:
    """Splits a text at commas, for lists in flags and variables; returns other values unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return value


def make_parser(
    kind: type[ProcessSettings], *, prog: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A parser with one flag per field; flags that are not given are absent from the result."""
    parser = Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in kind.model_fields.items():
        if SecretStr in get_args(field.annotation):
            continue
        section = _section(field)
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        flag = "--" + name.replace("_", "-")
        text = f"{field.description} [{_default_text(field)}]".replace("%", "%%")
        if field.annotation is bool:
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif get_origin(field.annotation) is dict:
            groups[section].add_argument(flag, action="append", metavar="NAME=VALUE", help=text)
        else:
            choices = _choices(field) or None
            metavar = None if choices else _type_text(field).upper()
            groups[section].add_argument(flag, choices=choices, metavar=metavar, help=text)
    return parser


def markdown_tables(kind: type[ProcessSettings]) -> list[str]:
    """The lines of docs/reference/configuration.md for one process: a table for each section."""
    tables: dict[str, list[str]] = {}
    for name, field in kind.model_fields.items():
        row = [f"`{name}`", _type_text(field), _default_text(field), field.description]
        line = f"| {' | '.join(str(cell) for cell in row)} |"
        tables.setdefault(_section(field), []).append(line)
    lines: list[str] = []
    for section, rows in tables.items():
        lines += ["", f"### {section}", ""]
        lines += ["| name | type | default | meaning |", "|---|---|---|---|", *rows]
    return lines


def _section(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["section"])


def _default_text(field: FieldInfo) -> str:
    if field.default in (None, "", (), {}):
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return ",".join(field.default)
    return str(field.default)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a Literal allows, or one that may be None; empty for every other type."""
    for kind in (field.annotation, *get_args(field.annotation)):
        options = get_args(kind)
        if options and all(isinstance(option, str) for option in options):
            return options
    return ()


def _type_text(field: FieldInfo) -> str:
    if choices := _choices(field):
        return ", ".join(choices)
    if get_origin(field.annotation) is tuple:
        return "list"
    if get_origin(field.annotation) is dict:
        return "table"
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds else field.annotation
    names = {SecretStr: "secret", bool: "flag", int: "integer", float: "number", str: "text"}
    return names.get(kind, "path")


def _describe(error: ValidationError) -> str:
    """One clause per wrong setting, without its value, which may be a secret."""
    clauses = []
    for item in error.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        reason = reason_of(item)
        clauses.append(f"{name}: {reason}" if name else reason)
    return "; ".join(clauses)
