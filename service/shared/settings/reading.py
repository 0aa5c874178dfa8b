"""Reads settings: flags win over variables, these over `quire.toml`, and that over defaults.

Defines only the settings that all processes have; each has a module with its own ones, such as
`service.worker.settings.config` and `service.gateway.settings`. A setting is a field; the text
below it is its sentence in `--help` and in docs/reference/configuration.md. This module does not
import torch, so that `--help` prints at once.
"""

import argparse
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo

from quire.cli.sources import (
    DEFAULT_FILE,
    SHARED_KEYS,
    misspelt_variables,
    read_tables,
    refuse_unknown_keys,
    unknown_variables,
    values_of_variables,
    with_password,
)
from quire.errors import InvalidRequest
from quire.wire.arguments import MAX_SECONDS
from service.shared.settings.fields import LogFormat, LogLevel, Port
from service.shared.settings.flags import make_parser
from service.shared.settings.sources import ConfigurationError, faults


class Section(BaseModel):
    """Settings that `--help` and docs/reference/configuration.md show under one title."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
    section: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


class _File(Section):
    section: ClassVar[str] = "Files"

    config_file: Path | None = None
    """TOML file to read; unset: `quire.toml` if it exists here."""


class _Redis(Section):
    section: ClassVar[str] = "Queue"

    redis_url: Annotated[str, Field(repr=False)] = "redis://127.0.0.1:6379/0"
    """URL of Redis: `redis://`, `rediss://` (TLS, with options such as `?ssl_ca_certs=<file>`),
    `unix://`, or through sentinels `redis+sentinel://host:port,.../service/0`
    (`rediss+sentinel://` if Redis uses TLS, with the same options). A cluster by some of its nodes:
    `redis+cluster://host:port,.../` or `rediss+cluster://`.
    """
    redis_password: SecretStr | None = None
    """Password, if it is not part of the URL. It has no flag, because `ps` shows flags."""

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

    @property
    def connection_url(self) -> str:
        """The Redis URL with `redis_password`, unless the URL has a password."""
        secret = self.redis_password
        # The `quire` command uses the same function, so both use the same server in one
        # environment.
        return with_password(self.redis_url, secret.get_secret_value() if secret else None)


class ProcessSettings(_Redis, _File):
    """The settings that all processes of the service have. Frozen; unknown names are refused."""

    section: ClassVar[str] = "Observability"
    #: How the process is run, and what its `--help` says of it.
    program: ClassVar[str]
    purpose: ClassVar[str]
    #: The process's table in the file, and the prefix of its variables.
    table: ClassVar[str]
    prefix: ClassVar[str]
    #: The worker's names of settings that have another name here.
    renamed: ClassVar[Mapping[str, str]] = {}

    http_host: str = "127.0.0.1"
    """Address of the HTTP server."""
    http_port: Port = 0
    """Port of the HTTP server; 0 takes a free one and logs it."""
    log_level: LogLevel = "info"
    """Least severe event that is logged."""
    log_format: LogFormat = "auto"
    """`auto` is console on a terminal and JSON elsewhere."""

    @field_validator("http_host")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        # A socket would treat an empty one as all addresses of the machine.
        if not value.strip():
            raise ValueError("must be an address (0.0.0.0 for all addresses of this machine)")
        return value

    @field_validator("*")
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> Any:
        # Python reads a variable that is not UTF-8 as a text that cannot be encoded again, which
        # would fail later, for instance in the worker registry.
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("must be a text in UTF-8") from None
        is_duration = str(info.field_name).endswith("_seconds") and value is not None
        if is_duration and not value <= MAX_SECONDS:
            raise ValueError(f"must be at most {MAX_SECONDS} seconds")
        return value

    @classmethod
    def sections(cls) -> dict[str, dict[str, FieldInfo]]:
        """The fields by section: that of the class which first defines a field."""
        kinds = [kind for kind in reversed(cls.__mro__) if issubclass(kind, Section)]
        found: dict[str, dict[str, FieldInfo]] = {}
        for name, field in cls.model_fields.items():
            owner = next(kind for kind in kinds if name in kind.model_fields)
            found.setdefault(owner.section, {})[name] = field
        # Every process ends with this one, though it is defined first.
        return found | {ProcessSettings.section: found.pop(ProcessSettings.section)}

    @classmethod
    def how_to_set(cls, name: str) -> str:
        """The flag and the variable of a setting, for a message about one that is missing."""
        return f"set --{name.replace('_', '-')} or {cls.prefix}{name.upper()}"

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        """The command line of this process."""
        return make_parser(
            cls.sections(), program=cls.program, purpose=cls.purpose, prefix=cls.prefix
        )

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """The settings of this process, from `argv`, `os.environ` and the file.

        Raises:
            ConfigurationError: a key is unknown or a value is wrong.
            SystemExit: `--help`, or a flag argparse cannot read.
        """
        flags = vars(cls.parser().parse_args(argv))
        try:
            return cls(**ChainMap(*cls.values_by_source(flags).values()))
        except InvalidRequest as error:
            raise ConfigurationError(str(error)) from error
        except ValidationError as error:
            raise ConfigurationError("; ".join(faults(error))) from error

    @classmethod
    def values_by_source(cls, flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What each source says, the one that wins first: flag, variable, file.

        InvalidRequest where a source cannot be read, or where the file has an unknown name.
        """
        variables = cls.read_variables(os.environ)
        named = flags.get("config_file") or variables.get("config_file")
        tables = read_tables(named)
        own = tables.get(cls.table, {})
        refuse_unknown_keys(
            own, cls.model_fields, source=f"[{cls.table}] of {named or DEFAULT_FILE}"
        )
        shared = {cls.renamed.get(key, key): tables[key] for key in SHARED_KEYS & tables.keys()}
        return {"flag": dict(flags), "variable": variables, "file": shared | own}

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Setting -> value from our variables. InvalidRequest."""
        return dict(values_of_variables(environ, cls.model_fields, prefix=cls.prefix))

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """A clause for each variable that has our prefix and is not one of ours."""
        return [*unknown_variables(environ, cls.model_fields, prefix=cls.prefix)]


class CompanionSettings(ProcessSettings):
    """The settings of a process beside the workers of a queue, such as the gateway.

    What it shares with the worker is also read from the worker's variables, so that both can use
    one environment; its own variables win.
    """

    #: Settings that such a process, if it has them, reads from the worker's variables, too.
    worker_names: ClassVar[Sequence[str]] = (
        *("config_file", "redis_url", "redis_password", "queue", "shards", "durable"),
        *("max_queue_seconds", "retention_seconds", "log_level", "log_format"),
    )

    @classmethod
    def shared_with_worker(cls) -> dict[str, str]:
        """The worker's name -> ours, for each setting that is also read from its variables."""
        names = {name: cls.renamed.get(name, name) for name in cls.worker_names}
        return {name: own for name, own in names.items() if own in cls.model_fields}

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Setting -> value from our own variables, and from the worker's for the others."""
        names, own = cls.shared_with_worker(), super().read_variables(environ)
        return {names[name]: v for name, v in values_of_variables(environ, names).items()} | own

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """A clause for each unknown variable of ours, and for a misspelt one that is shared."""
        shared = misspelt_variables(environ, cls.shared_with_worker())
        return [*super().unknown_variables(environ), *shared]
