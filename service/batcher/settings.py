"""Every setting of the batcher. Flags, variables and the page of settings are derived from it."""

import argparse
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic_settings import SettingsConfigDict

from quire.batch.progress import DEFAULT_MAX_INFLIGHT
from quire.cli.sources import ENV_PREFIX
from service.batches.settings import MAX_LINES, FileSettings
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
)
from service.settings.sources import read_environment

#: The next port after that of the gateway.
BATCHER_PORT = 10_403

#: The shortest lease: renewals come three times within it, over a network.
MIN_LEASE_SECONDS = 0.5
LEASE_REASON = "a batcher renews it three times within this time"

#: Settings that the batcher shares with the worker, and those with the gateway, under the same
#: names.
SHARED_WITH_WORKER = (
    *("config_file", "redis_url", "redis_password", "queue", "shards", "durable"),
    *("max_queue_seconds", "retention_seconds", "log_level", "log_format"),
)
SHARED_WITH_GATEWAY = ("files_folder", "files_url", "file_seconds", "models_file")


class BatcherSettings(FileSettings):
    """All settings of a batcher."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}BATCHER_")
    file_table: ClassVar[str] = "batcher"
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "lease_seconds": (MIN_LEASE_SECONDS, LEASE_REASON),
        **ProcessSettings.least_seconds,
    }

    queue: str = setting("Queue", "Queue of the batches.", default="default", pattern=QUEUE_PATTERN)
    shards: int = setting(
        "Queue", "Shards of the queue, as its workers know it.", default=1, ge=1, le=1024
    )
    durable: bool = setting(
        "Queue",
        "The requests of a batch are submitted once they are on the disk of Redis.",
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

    max_running_batches: int = setting(
        "Batches", "Most batches that this process runs at once.", default=4, ge=1, le=64
    )
    max_inflight: int = setting(
        "Batches",
        "Most requests of one batch that are queued or running at once.",
        default=DEFAULT_MAX_INFLIGHT,
        ge=1,
    )
    max_lines: int = setting("Batches", "Most requests of one batch.", default=MAX_LINES, ge=1)
    max_line_bytes: int = setting(
        "Batches", "Longest line of an input file.", default=4 << 20, ge=1
    )
    lease_seconds: float = setting(
        "Batches",
        "After so long without a sign of life from its batcher, another one continues a batch.",
        default=10.0,
    )
    save_seconds: float = setting(
        "Batches",
        "How often results are brought to the disk, and the offset and the counts to Redis.",
        default=2.0,
        gt=0.0,
    )
    poll_seconds: float = setting(
        "Batches", "How often an idle batcher looks for a batch.", default=1.0, gt=0.0
    )
    drain_seconds: float = setting(
        "Batches",
        "After SIGTERM, how long it may take to save the open batches and to give them back.",
        default=10.0,
        ge=0.0,
    )

    http_host: str = setting("Observability", "Address of the HTTP server.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it.",
        default=BATCHER_PORT,
        ge=0,
        le=65_535,
    )
    log_level: LogLevel = setting("Observability", LOG_LEVEL_TEXT, default="info")
    log_format: LogFormat = setting("Observability", LOG_FORMAT_TEXT, default="auto")

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """The batcher's own variables, which override those that it shares with others."""
        shared = read_environment(environ, SHARED_WITH_WORKER)
        gateway = f"{ENV_PREFIX}GATEWAY_"
        shared |= read_environment(environ, SHARED_WITH_GATEWAY, prefix=gateway)
        prefix = str(cls.model_config["env_prefix"])
        return shared | read_environment(environ, cls.model_fields, prefix=prefix)


def load_batcher_settings(argv: Sequence[str] | None = None) -> BatcherSettings:
    """The settings of this process.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    return load(BatcherSettings, build_batcher_parser(), argv)


def build_batcher_parser() -> argparse.ArgumentParser:
    """The batcher's command line."""
    return make_parser(
        BatcherSettings,
        prog="python -m service.batcher",
        description="Run the batches of a queue that callers create over HTTP. Run any number.",
        epilog="Each flag can also be set as QUIRE_BATCHER_<NAME> or in quire.toml; flags win.",
    )
