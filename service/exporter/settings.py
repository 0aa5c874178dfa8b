"""Every setting of the exporter. Flags, variables and documentation are derived from the fields."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from service.shared.settings.fields import (
    HTTP_HOST,
    LOG_FORMAT,
    LOG_LEVEL,
    LogFormat,
    LogLevel,
    QueueNames,
    port,
    setting,
)
from service.shared.settings.reading import CompanionSettings
from service.worker.settings.config import Settings

#: Between the worker's port and the gateway's.
EXPORTER_PORT = 10_401


class ExporterSettings(CompanionSettings):
    """All settings of the exporter."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}EXPORTER_")
    program: ClassVar[str] = "python -m service.exporter"
    purpose: ClassVar[str] = "Export the state of queues to Prometheus. Run one for all workers."
    file_table: ClassVar[str] = "exporter"
    renamed: ClassVar[Mapping[str, str]] = {"queue": "queues", "shards": "num_shards"}

    queues: QueueNames = setting(
        "Queue",
        "Queues to export, separated by commas. The worker's `QUIRE_QUEUE` is used if "
        "`QUIRE_EXPORTER_QUEUES` is not set.",
        default=("default",),
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
    http_host: str = HTTP_HOST
    http_port: int = port("`/livez` and `/metrics`", default=EXPORTER_PORT)
    log_level: LogLevel = LOG_LEVEL
    log_format: LogFormat = LOG_FORMAT

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """A clause for each unknown variable with our prefix or with the worker's."""
        return super().unknown_variables(environ) + Settings.unknown_variables(environ)
