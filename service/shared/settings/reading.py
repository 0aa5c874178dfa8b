"""Reads settings: flags win over variables, these over `quire.toml`, and that over defaults.

Defines only the settings that all processes have; each has a module with its own ones, such as
`service.worker.settings.config` and `service.gateway.settings`. This module does not import torch,
so that `--help` prints at once.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from quire.cli.sources import DEFAULT_FILE, ENV_PREFIX, SHARED_KEYS, with_password
from quire.wire.arguments import MAX_SECONDS, MIN_KEPT_SECONDS
from quire.wire.refusals import reason_of
from service.shared.settings.fields import setting
from service.shared.settings.flags import make_parser
from service.shared.settings.sources import (
    ConfigurationError,
    read_environment,
    read_file,
    unknown_variables,
)

#: The reason for MIN_KEPT_SECONDS.
NOTHING_KEPT = "Redis counts whole milliseconds, so less would be 0"

#: The settings that a process beside the workers, if it has them, reads from their variables, too.
COMMON_SETTINGS = (
    *("config_file", "redis_url", "redis_password", "queue", "shards", "durable"),
    *("max_queue_seconds", "retention_seconds", "log_level", "log_format"),
)


class ProcessSettings(BaseSettings):
    """The settings that all processes of the service have. Frozen; unknown names are refused.

    A subclass defines `program` and `purpose`, which its `--help` prints, and `file_table`, its
    table of the file.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX)
    program: ClassVar[str]
    purpose: ClassVar[str]
    file_table: ClassVar[str]
    #: The worker's names of settings that have another name here.
    renamed: ClassVar[Mapping[str, str]] = {}
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
    def parser(cls) -> argparse.ArgumentParser:
        """The command line of this process."""
        prefix = str(cls.model_config["env_prefix"])
        fields = cls.model_fields
        return make_parser(fields, program=cls.program, purpose=cls.purpose, prefix=prefix)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """The settings of this process, from `argv`, `os.environ` and the file.

        Raises:
            ConfigurationError: a key is unknown or a value is wrong.
            SystemExit: `--help`, or a flag argparse cannot read.
        """
        flags = vars(cls.parser().parse_args(argv))
        try:
            return cls(**flags)
        except ValidationError as error:
            raise ConfigurationError(_describe(error)) from error

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
        shared = {key: cls.renamed.get(key, key) for key in SHARED_KEYS}
        file = read_file(named, cls.model_fields, table=cls.file_table, shared=shared)
        sources = {"flag": dict(flags), "variable": variables, "file": file}
        chosen = [values["preset"] for values in sources.values() if "preset" in values]
        # A name that is no preset is refused by the field.
        preset = cls.presets.get(str(chosen[0]), {}) if chosen else {}
        return sources | {"preset": dict(preset)}


class CompanionSettings(ProcessSettings):
    """The settings of a process beside the workers of a queue, such as the gateway.

    What it shares with the worker is also read from the worker's variables, so that both can use
    one environment; its own variables win.
    """

    @classmethod
    def shared_with_worker(cls) -> dict[str, str]:
        """The worker's name -> ours, for each setting that is also read from its variables."""
        names = {name: cls.renamed.get(name, name) for name in COMMON_SETTINGS}
        return {name: own for name, own in names.items() if own in cls.model_fields}

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Setting -> value from our own variables, and from the worker's for the others."""
        names = cls.shared_with_worker()
        shared = {names[name]: text for name, text in read_environment(environ, names).items()}
        prefix = str(cls.model_config["env_prefix"])
        return shared | read_environment(environ, cls.model_fields, prefix=prefix)


def _describe(error: ValidationError) -> str:
    """One clause per wrong setting, without its value, which may be a secret."""
    clauses = []
    for item in error.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        reason = reason_of(item)
        clauses.append(f"{name}: {reason}" if name else reason)
    return "; ".join(clauses)
