"""Every setting of the batcher. Flags, variables and the page of settings are derived from it."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic_settings import SettingsConfigDict

from quire.batch.progress import DEFAULT_MAX_INFLIGHT
from quire.cli.sources import ENV_PREFIX
from service.shared.batches.settings import MAX_LINES, FileSettings
from service.shared.settings.fields import (
    HTTP_HOST,
    LOG_FORMAT,
    LOG_LEVEL,
    MAX_QUEUE_SECONDS,
    RETENTION_SECONDS,
    SHARDS,
    LogFormat,
    LogLevel,
    QueueName,
    port,
    setting,
)
from service.shared.settings.reading import ProcessSettings
from service.shared.settings.sources import read_environment

#: The next port after that of the gateway.
BATCHER_PORT = 10_403

#: The shortest lease: renewals come three times within it, over a network.
MIN_LEASE_SECONDS = 0.5
LEASE_REASON = "a batcher renews it three times within this time"

#: Settings that the batcher also reads from the gateway's variables.
SHARED_WITH_GATEWAY = ("files_folder", "files_url", "file_seconds", "models_file")


class BatcherSettings(FileSettings):
    """All settings of a batcher."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}BATCHER_")
    program: ClassVar[str] = "python -m service.batcher"
    purpose: ClassVar[str] = (
        "Run the batches of a queue that callers create over HTTP. Run any number."
    )
    file_table: ClassVar[str] = "batcher"
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "lease_seconds": (MIN_LEASE_SECONDS, LEASE_REASON),
        **ProcessSettings.least_seconds,
    }

    queue: QueueName = setting("Queue", "Queue of the batches.", default="default")
    shards: int = SHARDS
    durable: bool = setting(
        "Queue",
        "The requests of a batch are submitted once they are on the disk of Redis.",
        default=False,
    )
    max_queue_seconds: float = MAX_QUEUE_SECONDS
    retention_seconds: float = RETENTION_SECONDS

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

    http_host: str = HTTP_HOST
    http_port: int = port("`/livez`, `/readyz` and `/metrics`", default=BATCHER_PORT)
    log_level: LogLevel = LOG_LEVEL
    log_format: LogFormat = LOG_FORMAT

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Setting -> value from our own variables; where unset, the gateway's and the worker's."""
        gateway = read_environment(environ, SHARED_WITH_GATEWAY, prefix=f"{ENV_PREFIX}GATEWAY_")
        return gateway | super().read_variables(environ)
