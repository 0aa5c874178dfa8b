"""The settings of what a worker does between Redis and its engine: queue, leases, commits."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from service.shared.settings.fields import (
    SPLIT,
    Count,
    KeptSeconds,
    Port,
    QueueName,
    at_least,
    at_most,
)
from service.shared.settings.reading import ProcessSettings, Section
from service.worker.settings import bounds
from service.worker.settings.engine import EngineSettings
from service.worker.settings.presets import PresetName

#: The port of /metrics. Prometheus' exporters use 9100 to 9999, and two of them often run on the
#: same machines: the node exporter (9100) and NVIDIA's DCGM exporter (9400).
WORKER_PORT = 10_400

Shard = Annotated[int, Field(ge=0)]


class PresetSettings(Section):
    """Which preset fills what is not set."""

    section: ClassVar[str] = "Files"

    preset: PresetName | None = None
    """Named set of settings (see Presets); flags, variables and the file override what it sets.
    Unset: none.
    """


def _printable(name: str) -> str:
    # The name is shown in tables and logs, and typed on the command line of `quire drain`.
    if not name.isprintable() or name != name.strip() or len(name) > bounds.MAX_NAME_LENGTH:
        raise ValueError(
            f"must be at most {bounds.MAX_NAME_LENGTH} printable characters, without spaces at "
            "the begin or end"
        )
    return name


class QueueSettings(Section):
    """What a worker serves, and how it takes requests."""

    section: ClassVar[str] = "Queue"

    queue: QueueName = "default"
    """Queue to serve."""
    shards: int = Field(default=1, ge=1, le=1024)
    """Shards of the queue; the same for its producers."""
    served_shards: Annotated[tuple[Shard, ...], SPLIT] = ()
    """Shards to serve, separated by commas; unset: all. Each shard needs at least one worker."""
    durable: bool = False
    """An end is reported only when it is on the disk of Redis (WAITAOF, or `appendfsync always`). A
    worker does not start if its Redis cannot promise that.
    """
    worker_name: Annotated[str, AfterValidator(_printable)] = ""
    """Name in the worker registry. Keep it over restarts, and give each worker of a queue another
    one. Unset: host name and process id.
    """
    claim_batch: int = Field(default=16, ge=1, le=256)
    """Requests claimed at once, and the most that may wait for the engine; all others wait in
    Redis, where every worker can claim them.
    """
    block_seconds: float = Field(default=1.0, gt=0.0, le=2.0)
    """How long one read waits for new requests."""
    burst: bool = False
    """Exit with 0 as soon as nothing can be claimed and all work is done, requests of dead workers
    included: it waits up to one lease for a sign of life of each worker that holds requests.
    Requests that are paused or scheduled for later stay, and the log says so.
    """
    models_file: Path | None = None
    """TOML file of models and their queues. The worker serves each that has a `source`, one at a
    time, and switches by what waits. Unset: the one `model` of the one `queue`.
    """
    served_models: Annotated[tuple[str, ...], SPLIT] = ()
    """The models of `models_file` to serve, separated by commas; unset: all with a `source`."""
    models_memory_bytes: Count | None = None
    """Memory that all loaded models may take together, weights and KV caches. A model that is not
    served stays loaded while it fits; the one that was served longest ago goes first. Unset: only
    the served one is loaded.
    """
    switch_stay_seconds: float = Field(default=5.0, ge=0.0)
    """Shortest time that a model is served while it has work and another one waits."""
    switch_wait_seconds: float = Field(default=10.0, ge=0.0)
    """A model whose requests have waited so long is served next, after the stay of the one before.
    An idle worker switches at once.
    """


class LeaseSettings(Section):
    """How long a worker holds a request, and when it publishes tokens."""

    section: ClassVar[str] = "Leases"

    lease_seconds: Annotated[
        float,
        at_least(bounds.MIN_LEASE_SECONDS, bounds.RENEWAL),
        at_most(bounds.MAX_LEASE_SECONDS, "the requests of a dead worker wait for so long"),
    ] = 10.0
    """A claim that is not renewed for this time is taken over by another worker. It is renewed
    after each third of it. At most a quarter of the sum of `max_queue_seconds` and
    `retention_seconds`.
    """
    max_attempts: Count = 5
    """Failed claims after which a request becomes a dead letter; a claim that has published tokens
    is not counted. Set this and the next two to the same for all workers of a queue.
    """
    max_queue_seconds: KeptSeconds = 86_400.0
    """Longest time a request may wait in the queue."""
    retention_seconds: KeptSeconds = 3600.0
    """How long the output of a finished request can be read."""
    stall_timeout_seconds: Annotated[
        float, at_least(bounds.MIN_STALL_SECONDS, "any step would count as a stall")
    ] = 120.0
    """If requests run and for this time no step ends, nor a layer of an encoder of pictures, the
    engine counts as stalled: leases are no longer renewed and `/livez` fails. If none ends for the
    same time again, while the process itself can run, the worker exits with 3.
    """
    request_timeout_seconds: float | None = Field(default=None, gt=0.0)
    """Longest time that this worker works on one request, from the claim on; then the request ends
    with its tokens, as after its deadline. Unset: no limit but the request's deadline.
    """
    session_affinity_seconds: float = Field(default=1.0, ge=0.0, le=60.0)
    """How long a turn of a session is kept for the worker of the last turn, which has its prefix,
    from when this worker could take it. 0: this worker takes every turn at once.
    """
    drain_seconds: float = Field(default=30.0, ge=0.0)
    """After SIGTERM, how long running requests may continue before they are released, with their
    tokens, to other workers.
    """
    flush_seconds: float = Field(default=10.0, ge=0.0)
    """After the drain, how long the last commits and releases may wait for Redis."""
    publish_interval_seconds: float = Field(default=0.0, ge=0.0, le=5.0)
    """Shortest time between two commits. A longer interval makes longer chunks."""
    publish_share: float = Field(default=0.02, gt=0.0, le=1.0)
    """Largest share of the time spent on commits, so that commits, Redis and readers leave the
    cores to the model: after each commit the publisher rests in proportion, for at most 0.1 s. With
    1 it commits as fast as Redis answers.
    """


# Pydantic collects the fields of the last class first.
class WorkerSettings(LeaseSettings, EngineSettings, QueueSettings, PresetSettings, ProcessSettings):
    """Every setting of a worker; `Settings` adds what they have to be together."""

    section: ClassVar[str] = ProcessSettings.section

    http_port: Port = WORKER_PORT
    """Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it."""
    traces: Literal["off", "otlp"] = "off"
    """`otlp` sends the spans of each claim that ends to an OpenTelemetry collector, which
    `OTEL_EXPORTER_OTLP_ENDPOINT` names (extra `otel`); see [traces](../how-to/traces.md).
    """
