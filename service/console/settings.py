"""Every setting of the console. Flags, variables and the page of settings are derived from it."""

import argparse
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
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

#: The next port after that of the notifier.
CONSOLE_PORT = 10_405

#: A host name as the header `Host` has it, without a port.
HOST_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?$"

#: Settings that the console shares with the worker: the worker's name -> ours.
SHARED_WITH_WORKER = {
    **{name: name for name in ("config_file", "redis_url", "redis_password", "shards")},
    **{name: name for name in ("max_queue_seconds", "retention_seconds")},
    **{name: name for name in ("log_level", "log_format")},
    "queue": "queues",
}


class ConsoleSettings(ProcessSettings):
    """All settings of a console."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}CONSOLE_")
    file_table: ClassVar[str] = "console"
    shared: ClassVar[Mapping[str, str]] = {**ProcessSettings.shared, "queue": "queues"}

    queues: tuple[Annotated[str, Field(pattern=QUEUE_PATTERN)], ...] = setting(
        "Queue",
        "Queues to show, separated by commas. The worker's `QUIRE_QUEUE` is used if "
        "`QUIRE_CONSOLE_QUEUES` is not set.",
        default=("default",),
        min_length=1,
        max_length=64,
    )
    shards: int = setting(
        "Queue", "Shards of each queue, as its workers know it.", default=1, ge=1, le=64
    )
    max_queue_seconds: float = setting(
        "Queue",
        "Longest time a request may wait in the queue, as its workers know it.",
        default=86_400.0,
        gt=0.0,
    )
    retention_seconds: float = setting(
        "Queue",
        "How long the output of a finished request can be read, as its workers know it.",
        default=3600.0,
        gt=0.0,
    )

    role: Literal["observer", "operator"] = setting(
        "Access",
        "`observer` only reads. `operator` also has buttons that change the queue. Give the "
        "console the Redis user of the same role.",
        default="observer",
    )
    users_file: Path | None = setting(
        "Access",
        "File of users, one line `name password [operator]` for each; read again at SIGHUP. They "
        "log in by HTTP's Basic scheme, programs send the password as a bearer token. Unset: "
        "everyone who reaches the port is let in.",
        default=None,
    )
    allowed_hosts: tuple[Annotated[str, Field(pattern=HOST_PATTERN)], ...] = setting(
        "Access",
        "Names under which browsers may reach the console, separated by commas. `localhost` and "
        "addresses are always allowed.",
        default=(),
        max_length=64,
    )
    trusted_proxies: tuple[str, ...] = setting(
        "Access",
        "Addresses or networks of proxies, separated by commas: what their `X-Forwarded-For` and "
        "`X-Forwarded-Proto` say counts. Failed logins are limited for each address.",
        default=("127.0.0.1",),
        max_length=64,
    )

    refresh_seconds: float = setting(
        "Pages", "How often an open page gets the new state.", default=2.0, ge=0.1, le=60.0
    )
    history_seconds: float = setting(
        "Pages",
        "How far back the plots of the queue go; they begin at the start of the console.",
        default=3600.0,
        ge=60.0,
        le=86_400.0,
    )
    max_streams: int = setting(
        "Pages",
        "Most pages that are kept up to date at once; others show one state.",
        default=100,
        ge=1,
        le=10_000,
    )

    http_host: str = setting("Observability", "Address to listen on.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of the pages, `/livez` and `/readyz`; 0 takes a free one and logs it.",
        default=CONSOLE_PORT,
        ge=0,
        le=65_535,
    )
    log_level: LogLevel = setting("Observability", LOG_LEVEL_TEXT, default="info")
    log_format: LogFormat = setting("Observability", LOG_FORMAT_TEXT, default="auto")

    @field_validator("queues", "allowed_hosts", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return () if value == "" else split_list(value)

    @field_validator("queues")
    @classmethod
    def _differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a queue is named twice")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            ipaddress.ip_network(text)
        return value

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Our own variables, which win over those of the worker with the same meaning."""
        worker = read_environment(environ, SHARED_WITH_WORKER)
        common = {SHARED_WITH_WORKER[name]: text for name, text in worker.items()}
        prefix = str(cls.model_config["env_prefix"])
        return common | read_environment(environ, cls.model_fields, prefix=prefix)


def load_console_settings(argv: Sequence[str] | None = None) -> ConsoleSettings:
    """The settings, from `argv`, `os.environ` and the file: see `settings.reading.load`.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    return load(ConsoleSettings, build_console_parser(), argv)


def build_console_parser() -> argparse.ArgumentParser:
    """The console's command line."""
    return make_parser(
        ConsoleSettings,
        prog="python -m service.console",
        description="Serve pages that show queues, and let operators change them.",
        epilog="Each flag can also be set as QUIRE_CONSOLE_<NAME> or in quire.toml; flags win.",
    )
