"""Every setting of the exporter. Flags, variables and documentation are derived from the fields."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from service.shared.settings.fields import Count, Port, QueueNames
from service.shared.settings.reading import CompanionSettings

#: Between the worker's port and the gateway's.
EXPORTER_PORT = 10_401


class ExporterSettings(CompanionSettings):
    """All settings of the exporter."""

    program: ClassVar[str] = "python -m service.exporter"
    purpose: ClassVar[str] = "Export the state of queues to Prometheus. Run one for all workers."
    table: ClassVar[str] = "exporter"
    prefix: ClassVar[str] = "QUIRE_EXPORTER_"
    renamed: ClassVar[Mapping[str, str]] = {"queue": "queues", "shards": "num_shards"}
    section: ClassVar[str] = "Queue"

    queues: QueueNames = ("default",)
    """Queues to export, separated by commas. The worker's `QUIRE_QUEUE` is used if
    `QUIRE_EXPORTER_QUEUES` is not set.
    """
    num_shards: Count = 1
    """Shards of each queue; their numbers are added up."""
    worker_fresh_seconds: float = Field(default=30.0, gt=0.0)
    """A worker counts as a consumer if it has registered within this time. Workers register about
    twice per lease.
    """
    timeout_seconds: float = Field(default=3.0, gt=0.0)
    """How long a scrape waits for Redis. Set it below the scrape timeout of Prometheus."""
    http_port: Port = EXPORTER_PORT
    """Port of `/livez` and `/metrics`; 0 takes a free one and logs it."""
