"""Every setting of the batcher. Flags, variables and the page of settings are derived from it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.batch.progress import DEFAULT_MAX_INFLIGHT
from quire.cli.sources import values_of_variables
from service.shared.batches.settings import MAX_LINES, FileSettings
from service.shared.settings.fields import Count, Port, QueueName, at_least

#: The next port after that of the gateway.
BATCHER_PORT = 10_403

#: The shortest lease: renewals come three times within it, over a network.
MIN_LEASE_SECONDS = 0.5

#: Settings that the batcher also reads from the gateway's variables.
SHARED_WITH_GATEWAY = ("files_folder", "files_url", "file_seconds", "models_file")


class BatcherSettings(FileSettings):
    """All settings of a batcher."""

    program: ClassVar[str] = "python -m service.batcher"
    purpose: ClassVar[str] = (
        "Run the batches of a queue that callers create over HTTP. Run any number."
    )
    table: ClassVar[str] = "batcher"
    prefix: ClassVar[str] = "QUIRE_BATCHER_"
    section: ClassVar[str] = "Batches"

    queue: QueueName = "default"
    """Queue of the batches."""
    durable: bool = False
    """The requests of a batch are submitted once they are on the disk of Redis."""
    max_running_batches: int = Field(default=4, ge=1, le=64)
    """Most batches that this process runs at once."""
    max_inflight: Count = DEFAULT_MAX_INFLIGHT
    """Most requests of one batch that are queued or running at once."""
    max_lines: Count = MAX_LINES
    """Most requests of one batch."""
    max_line_bytes: Count = 4 << 20
    """Longest line of an input file."""
    lease_seconds: Annotated[
        float, at_least(MIN_LEASE_SECONDS, "a batcher renews it three times within this time")
    ] = 10.0
    """After so long without a sign of life from its batcher, another one continues a batch."""
    save_seconds: float = Field(default=2.0, gt=0.0)
    """How often results are brought to the disk, and the offset and the counts to Redis."""
    poll_seconds: float = Field(default=1.0, gt=0.0)
    """How often an idle batcher looks for a batch."""
    drain_seconds: float = Field(default=10.0, ge=0.0)
    """After SIGTERM, how long it may take to save the open batches and to give them back."""
    http_port: Port = BATCHER_PORT
    """Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it."""

    @classmethod
    def read_variables(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Setting -> value from our own variables; where unset, the gateway's and the worker's."""
        gateway = values_of_variables(environ, SHARED_WITH_GATEWAY, prefix="QUIRE_GATEWAY_")
        return gateway | super().read_variables(environ)
