"""Every setting of the gateway. Flags, variables and the page of settings are derived from it.

Imports no module of the worker, and therefore no module of the engine.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from quire.openai.tools.reasoning import ReasoningSetting
from service.batches.settings import FileSettings
from service.gateway.http.cors import ORIGIN_PATTERN
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

#: The next port after those of the worker and the exporter.
GATEWAY_PORT = 10_402

#: The shortest timeout for a caller, and the reason.
MIN_PATIENCE_SECONDS = 0.05
PATIENCE_REASON = "the way over a network may take as long"

#: Settings of the queue that gateway and worker share, under the same names.
SHARED_WITH_WORKER = (
    *("config_file", "redis_url", "redis_password", "queue", "shards", "durable"),
    *("max_queue_seconds", "retention_seconds", "log_level", "log_format"),
)


class GatewaySettings(FileSettings):
    """All settings of a gateway."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}GATEWAY_")
    file_table: ClassVar[str] = "gateway"
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "body_timeout_seconds": (MIN_PATIENCE_SECONDS, PATIENCE_REASON),
        "patience_seconds": (MIN_PATIENCE_SECONDS, PATIENCE_REASON),
        **ProcessSettings.least_seconds,
    }

    queue: str = setting("Queue", "Queue to submit to.", default="default", pattern=QUEUE_PATTERN)
    shards: int = setting(
        "Queue", "Shards of the queue, as its workers know it.", default=1, ge=1, le=1024
    )
    durable: bool = setting(
        "Queue",
        "A call is accepted once it is on the disk of Redis (WAITAOF, or `appendfsync always`).",
        default=False,
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

    keys_file: Path | None = setting(
        "Callers",
        "File of API keys, one line `key tenant [priority]` for each; read again at SIGHUP. Unset: "
        "no key is needed.",
        default=None,
    )
    allowed_origins: tuple[Annotated[str, Field(pattern=ORIGIN_PATTERN)], ...] = setting(
        "Callers",
        "Origins whose pages may call and read, as `https://page.example`, separated by commas; "
        "`*` is every origin. Unset: pages of other origins can read nothing.",
        default=(),
        max_length=64,
    )
    max_body_bytes: int = setting("Callers", "Longest body of a call.", default=4 << 20, ge=1)
    max_open_answers: int = setting(
        "Callers", "Most answers open at once; more are refused with 503.", default=1000, ge=1
    )
    max_open_answers_per_tenant: int | None = setting(
        "Callers",
        "Most answers of one tenant open at once; more are refused with 429. Unset: one tenant "
        "may have all.",
        default=None,
        ge=1,
    )
    body_timeout_seconds: float = setting(
        "Callers", "How long a caller may take to send its body.", default=30.0, gt=0.0
    )
    patience_seconds: float = setting(
        "Callers",
        "How long a caller may read nothing of what it was sent; then it counts as gone.",
        default=60.0,
        gt=0.0,
    )
    drain_seconds: float = setting(
        "Callers",
        "After SIGTERM, how long open answers may go on. Those that remain are broken off, so that "
        "their callers can continue at another gateway.",
        default=30.0,
        ge=0.0,
    )

    max_files: int = setting(
        "Files and batches", "Most files of one tenant; more are refused.", default=10_000, ge=1
    )
    max_open_batches: int = setting(
        "Files and batches",
        "Most batches of one tenant that have not ended; more are refused.",
        default=100,
        ge=1,
    )
    max_batches: int = setting(
        "Files and batches",
        "Most batches of one tenant, ended ones included; more are refused.",
        default=10_000,
        ge=1,
    )

    reasoning: ReasoningSetting = setting(
        "Answers",
        "Which reasoning of a chat is sent as `reasoning_content`: that of all formats (`auto`), "
        "of none, or of one.",
        default="auto",
    )

    http_host: str = setting("Observability", "Address to listen on.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of the API, `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it.",
        default=GATEWAY_PORT,
        ge=0,
        le=65_535,
    )
    log_level: LogLevel = setting("Observability", LOG_LEVEL_TEXT, default="info")
    log_format: LogFormat = setting("Observability", LOG_FORMAT_TEXT, default="auto")

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return () if value == "" else split_list(value)

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """The gateway's own variables, which override those it shares with the worker."""
        shared = read_environment(environ, SHARED_WITH_WORKER)
        prefix = str(cls.model_config["env_prefix"])
        return shared | read_environment(environ, cls.model_fields, prefix=prefix)


def load_gateway_settings(argv: Sequence[str] | None = None) -> GatewaySettings:
    """The settings of this process.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    return load(GatewaySettings, build_gateway_parser(), argv)


def build_gateway_parser() -> argparse.ArgumentParser:
    """The gateway's command line."""
    return make_parser(
        GatewaySettings,
        prog="python -m service.gateway",
        description="Serve OpenAI's API in front of a queue. Run as many as you like.",
        epilog="Each flag can also be set as QUIRE_GATEWAY_<NAME> or in quire.toml; flags win.",
    )
