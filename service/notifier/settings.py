"""Every setting of the notifier. Flags, variables and documentation are derived from the fields."""

import argparse
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import field_validator
from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from service.notifier.addresses import Network
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

#: The next port after that of the batcher.
NOTIFIER_PORT = 10_404


class NotifierSettings(ProcessSettings):
    """All settings of a notifier."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}NOTIFIER_")
    file_table: ClassVar[str] = "notifier"

    queue: str = setting("Queue", "Queue to read.", default="default", pattern=QUEUE_PATTERN)
    shards: int = setting(
        "Queue", "Shards of the queue, as its workers know it.", default=1, ge=1, le=1024
    )
    endpoints_file: Path = setting(
        "Webhooks",
        "TOML file of the operator with the `[[endpoints]]` of the tenants: `tenant`, `url`, "
        "`secrets`, `events`.",
        default=Path("endpoints.toml"),
    )
    allowed_networks: tuple[str, ...] = setting(
        "Webhooks",
        "Networks that webhooks may go to although their addresses are not public, separated by "
        "commas, such as `10.1.0.0/16`.",
        default=(),
        max_length=64,
    )
    allows_http: bool = setting(
        "Webhooks", "Accept endpoints without TLS. Their webhooks can be read.", default=False
    )
    max_posts: int = setting(
        "Webhooks", "Most webhooks of a shard that are posted at once.", default=32, ge=1, le=1024
    )
    post_timeout_seconds: float = setting(
        "Webhooks",
        "Longest time of one attempt: name, connection, TLS and answer.",
        default=15.0,
        ge=0.1,
        le=120.0,
    )
    first_pause_seconds: float = setting(
        "Webhooks",
        "Pause after the first failed attempt; each further pause is four times as long.",
        default=5.0,
        ge=0.01,
        le=3600.0,
    )
    longest_pause_seconds: float = setting(
        "Webhooks", "Longest pause between two attempts.", default=14_400.0, ge=0.01, le=86_400.0
    )
    give_up_seconds: float = setting(
        "Webhooks",
        "A webhook is given up when its end is so long ago.",
        default=259_200.0,
        ge=1.0,
        le=2_592_000.0,
    )
    max_pending: int = setting(
        "Webhooks",
        "Most webhooks of one tenant in a shard that wait; further ones are dropped, and logged.",
        default=10_000,
        ge=1,
        le=1_000_000,
    )
    take_over_seconds: float = setting(
        "Webhooks",
        "After so long another notifier keeps the webhooks of ends that one has only read.",
        default=30.0,
        ge=0.1,
        le=3600.0,
    )
    http_host: str = setting("Observability", "Address of the HTTP server.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it.",
        default=NOTIFIER_PORT,
        ge=0,
        le=65_535,
    )
    log_level: LogLevel = setting("Observability", LOG_LEVEL_TEXT, default="info")
    log_format: LogFormat = setting("Observability", LOG_FORMAT_TEXT, default="auto")

    @field_validator("allowed_networks", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_list(value)

    @field_validator("allowed_networks")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            ipaddress.ip_network(text)
        return value

    @property
    def allowed(self) -> Sequence[Network]:
        """The allowed networks."""
        return [ipaddress.ip_network(text) for text in self.allowed_networks]

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Our own variables, which win over those of the worker with the same meaning."""
        common = read_environment(environ, SHARED_WITH_WORKER)
        prefix = str(cls.model_config["env_prefix"])
        return common | read_environment(environ, cls.model_fields, prefix=prefix)


#: Settings of the queue that notifier and worker share, under the same names.
SHARED_WITH_WORKER = (
    *("config_file", "redis_url", "redis_password", "queue", "shards"),
    *("log_level", "log_format"),
)


def load_notifier_settings(argv: Sequence[str] | None = None) -> NotifierSettings:
    """The settings, from `argv`, `os.environ` and the file: see `settings.reading.load`.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    return load(NotifierSettings, build_notifier_parser(), argv)


def build_notifier_parser() -> argparse.ArgumentParser:
    """The notifier's command line."""
    return make_parser(
        NotifierSettings,
        prog="python -m service.notifier",
        description="Post webhooks for the ends of a queue. Run any number of them.",
        epilog="Each flag can also be set as QUIRE_NOTIFIER_<NAME> or in quire.toml; flags win.",
    )
