"""Every setting of the exporter. Flags, variables and documentation are derived from the fields."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from service.settings.config import Settings
from service.settings.reading import (
    LOG_FORMAT_TEXT,
    LOG_LEVEL_TEXT,
    QUEUE_PATTERN,
    LogFormat,
    LogLevel,
    ProcessSettings,
    load,
    make_parser,
    setting,
    split_list,
)
from service.settings.sources import read_environment

#: Between the worker's port and the gateway's.
EXPORTER_PORT = 10_401


class ExporterSettings(ProcessSettings):
    """All settings of the exporter.

    Settings that the worker has, too, are also read from the worker's variables, so that both can
    use the same environment.
    """

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}EXPORTER_")
    file_table: ClassVar[str] = "exporter"
    shared: ClassVar[Mapping[str, str]] = {
        **ProcessSettings.shared,
        "queue": "queues",
        "shards": "num_shards",
    }

    queues: tuple[Annotated[str, Field(pattern=QUEUE_PATTERN)], ...] = setting(
        "Queue",
        "Queues to export, separated by commas. The worker's `QUIRE_QUEUE` is used if "
        "`QUIRE_EXPORTER_QUEUES` is not set.",
        default=("default",),
        min_length=1,
        max_length=64,
    )
    num_shards: int = setting(
        "Queue", "Shards of each queue; their numbers are added up.", default=1, ge=1
    )
    worker_fresh_seconds: float = setting(
        "Queue",
        "A worker counts as a consumer if it has registered within this time. Workers register "
        "about twice per lease.",
        default=30.0,
        gt=0.0,
    )
    timeout_seconds: float = setting(
        "Queue",
        "How long a scrape waits for Redis. Set it below the scrape timeout of Prometheus.",
        default=3.0,
        gt=0.0,
    )
    http_host: str = setting("Observability", "Address of the HTTP server.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of `/livez` and `/metrics`; 0 takes a free one and logs it.",
        default=EXPORTER_PORT,
        ge=0,
        le=65_535,
    )
    log_level: LogLevel = setting("Observability", LOG_LEVEL_TEXT, default="info")
    log_format: LogFormat = setting("Observability", LOG_FORMAT_TEXT, default="auto")

    @field_validator("queues", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_list(value)

    @field_validator("queues")
    @classmethod
    def _differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a queue is named twice")
        return value

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Our own variables, which win over the shared variables of the worker."""
        worker = read_environment(environ, Settings.model_fields)
        shared = {**cls.shared, "config_file": "config_file", "redis_password": "redis_password"}
        common = {shared[name]: text for name, text in worker.items() if name in shared}
        prefix = str(cls.model_config["env_prefix"])
        return common | read_environment(environ, cls.model_fields, prefix=prefix)

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """A clause for each unknown variable with our prefix or with the worker's."""
        return super().unknown_variables(environ) + Settings.unknown_variables(environ)


def load_exporter_settings(argv: Sequence[str] | None = None) -> ExporterSettings:
    """The exporter's settings, from `argv`, `os.environ` and the file: see `settings.reading.load`.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    return load(ExporterSettings, build_exporter_parser(), argv)


def build_exporter_parser() -> argparse.ArgumentParser:
    """The exporter's command line."""
    return make_parser(
        ExporterSettings,
        prog="python -m service.exporter",
        description="Export the state of queues to Prometheus. Run one for all workers.",
        epilog="Each flag can also be set as QUIRE_EXPORTER_<NAME> or in quire.toml; flags win.",
    )
