"""Every setting of the worker; exporter and gateway have their own modules.

Flags, variables, keys of the file and docs/reference/configuration.md come from these fields.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from service.shared.settings.fields import (
    HTTP_HOST,
    LOG_FORMAT,
    LOG_LEVEL,
    LogFormat,
    LogLevel,
    QueueName,
    Texts,
    port,
    setting,
    split_list,
)
from service.shared.settings.reading import ProcessSettings
from service.shared.settings.sources import table_of, table_variables
from service.worker.settings import bounds
from service.worker.settings.combinations import refusal
from service.worker.settings.engine import EngineSettings
from service.worker.settings.presets import PRESETS, PresetName

#: The model that ships with the checkout.
EMBEDDED_MODEL = Path(__file__).resolve().parents[3] / "models" / "abacus"

#: The prefix of the variables that are arguments of vLLM.
VLLM_PREFIX = "QUIRE_VLLM_"

#: The port of /metrics. Prometheus' exporters use 9100 to 9999, and two of them often run on the
#: same machines: the node exporter (9100) and NVIDIA's DCGM exporter (9400).
WORKER_PORT = 10_400

Shard = Annotated[int, Field(ge=0)]


class Settings(EngineSettings):
    """All settings of a worker. Frozen: an "auto" value is resolved into another object."""

    program: ClassVar[str] = "python -m service"
    purpose: ClassVar[str] = (
        "Run a worker: claim requests from Redis, generate, publish every token."
    )
    file_table: ClassVar[str] = "worker"
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "lease_seconds": (
            bounds.MIN_LEASE_SECONDS,
            bounds.RENEWAL,
        ),
        "stall_timeout_seconds": (bounds.MIN_STALL_SECONDS, "any step would count as a stall"),
        **ProcessSettings.least_seconds,
    }
    most_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "lease_seconds": (
            bounds.MAX_LEASE_SECONDS,
            "the requests of a dead worker wait for so long",
        ),
    }

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    preset: PresetName | None = setting(
        "Files",
        "Named set of settings (see Presets); flags, variables and the file override what it sets. "
        "Unset: none.",
        default=None,
    )

    queue: QueueName = setting("Queue", "Queue to serve.", default="default")
    shards: int = setting(
        "Queue", "Shards of the queue; the same for its producers.", default=1, ge=1, le=1024
    )
    served_shards: Annotated[tuple[Shard, ...], BeforeValidator(split_list)] = setting(
        "Queue",
        "Shards to serve, separated by commas; unset: all. Each shard needs at least one worker.",
        default=(),
    )
    durable: bool = setting(
        "Queue",
        "An end is reported only when it is on the disk of Redis (WAITAOF, or `appendfsync "
        "always`). A worker does not start if its Redis cannot promise that.",
        default=False,
    )
    worker_name: str = setting(
        "Queue",
        "Name in the worker registry. Keep it over restarts, and give each worker of a queue "
        "another one. Unset: host name and process id.",
        default="",
    )
    claim_batch: int = setting(
        "Queue",
        "Requests claimed at once, and the most that may wait for the engine; all others wait in "
        "Redis, where every worker can claim them.",
        default=16,
        ge=1,
        le=256,
    )
    block_seconds: float = setting(
        "Queue", "How long one read waits for new requests.", default=1.0, gt=0.0, le=2.0
    )
    burst: bool = setting(
        "Queue",
        "Exit with 0 as soon as nothing can be claimed and all work is done, requests of dead "
        "workers included: it waits up to one lease for a sign of life of each worker that holds "
        "requests. Requests that are paused or scheduled for later stay, and the log says so.",
        default=False,
    )

    models_file: Path | None = setting(
        "Queue",
        "TOML file of models and their queues. The worker serves each that has a `source`, one at "
        "a time, and switches by what waits. Unset: the one `model` of the one `queue`.",
        default=None,
    )
    served_models: Texts = setting(
        "Queue",
        "The models of `models_file` to serve, separated by commas; unset: all with a `source`.",
        default=(),
    )
    models_memory_bytes: int | None = setting(
        "Queue",
        "Memory that all loaded models may take together, weights and KV caches. A model that is "
        "not served stays loaded while it fits; the one that was served longest ago goes first. "
        "Unset: only the served one is loaded.",
        default=None,
        ge=1,
    )
    switch_stay_seconds: float = setting(
        "Queue",
        "Shortest time that a model is served while it has work and another one waits.",
        default=5.0,
        ge=0.0,
    )
    switch_wait_seconds: float = setting(
        "Queue",
        "A model whose requests have waited so long is served next, after the stay of the one "
        "before. An idle worker switches at once.",
        default=10.0,
        ge=0.0,
    )

    lease_seconds: float = setting(
        "Leases",
        "A claim that is not renewed for this time is taken over by another worker. It is renewed "
        "after each third of it. At most a quarter of the sum of `max_queue_seconds` and "
        "`retention_seconds`.",
        default=10.0,
        gt=0.0,
    )
    max_attempts: int = setting(
        "Leases",
        "Failed claims after which a request becomes a dead letter; a claim that has published "
        "tokens is not counted. Set this and the next two to the same for all workers of a queue.",
        default=5,
        ge=1,
    )
    max_queue_seconds: float = setting(
        "Leases", "Longest time a request may wait in the queue.", default=86_400.0, gt=0.0
    )
    retention_seconds: float = setting(
        "Leases", "How long the output of a finished request can be read.", default=3600.0, gt=0.0
    )
    stall_timeout_seconds: float = setting(
        "Leases",
        "If requests run and no step ends for this time, the engine counts as stalled: leases are "
        "no longer renewed and `/livez` fails. If no step ends for the same time again, while the "
        "process itself can run, the worker exits with 3.",
        default=120.0,
        gt=0.0,
    )
    request_timeout_seconds: float | None = setting(
        "Leases",
        "Longest time that this worker works on one request, from the claim on; then the request "
        "ends with its tokens, as after its deadline. Unset: no limit but the request's deadline.",
        default=None,
        gt=0.0,
    )
    session_affinity_seconds: float = setting(
        "Leases",
        "How long a turn of a session is kept for the worker of the last turn, which has its "
        "prefix, from when this worker could take it. 0: this worker takes every turn at once.",
        default=1.0,
        ge=0.0,
        le=60.0,
    )
    drain_seconds: float = setting(
        "Leases",
        "After SIGTERM, how long running requests may continue before they are released, with "
        "their tokens, to other workers.",
        default=30.0,
        ge=0.0,
    )
    flush_seconds: float = setting(
        "Leases",
        "After the drain, how long the last commits and releases may wait for Redis.",
        default=10.0,
        ge=0.0,
    )
    publish_interval_seconds: float = setting(
        "Leases",
        "Shortest time between two commits. A longer interval makes longer chunks.",
        default=0.0,
        ge=0.0,
        le=5.0,
    )
    publish_share: float = setting(
        "Leases",
        "Largest share of the time spent on commits, so that commits, Redis and readers leave the "
        "cores to the model: after each commit the publisher rests in proportion, for at most "
        "0.1 s. With 1 it commits as fast as Redis answers.",
        default=0.02,
        gt=0.0,
        le=1.0,
    )

    http_host: str = HTTP_HOST
    http_port: int = port("`/livez`, `/readyz` and `/metrics`", default=WORKER_PORT)
    log_level: LogLevel = LOG_LEVEL
    log_format: LogFormat = LOG_FORMAT
    traces: Literal["off", "otlp"] = setting(
        "Observability",
        "`otlp` sends the spans of each claim that ends to an OpenTelemetry collector, which "
        "`OTEL_EXPORTER_OTLP_ENDPOINT` names (extra `otel`); see [traces](../how-to/traces.md).",
        default="off",
    )

    @classmethod
    def values_by_source(cls, flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """See `ProcessSettings`; arguments of vLLM are merged, one by one, over all sources."""
        sources = super().values_by_source(flags)
        named = table_variables(os.environ, prefix=VLLM_PREFIX)
        if named:
            variables = sources["variable"]
            variables["vllm"] = table_of(variables.get("vllm", {}), name="vllm") | named
        for values in sources.values():
            if "vllm" in values:
                values["vllm"] = table_of(values["vllm"], name="vllm")
        return sources

    @field_validator("adapters", mode="before")
    @classmethod
    def _empty_means_unset(cls, value: object) -> object:
        # Compose passes a variable to a container as an empty text if it is not set.
        return value or None

    @field_validator("worker_name")
    @classmethod
    def _is_printable(cls, value: str) -> str:
        # It is shown in tables and logs, and typed on the command line of `quire drain`.
        if not value.isprintable() or value != value.strip() or len(value) > bounds.MAX_NAME_LENGTH:
            raise ValueError(
                f"must be at most {bounds.MAX_NAME_LENGTH} printable characters, without spaces at "
                "the begin or end"
            )
        return value

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        if (reason := refusal(self)) is not None:
            raise ValueError(reason)
        return self

    @property
    def own_shards(self) -> tuple[int, ...]:
        """The shards this worker serves."""
        return self.served_shards or tuple(range(self.shards))

    @property
    def model_source(self) -> str:
        """The model to load: the folder, file or name that was set, or the embedded model."""
        return self.model if self.model is not None else str(EMBEDDED_MODEL)

    @property
    def model_name(self) -> str:
        """The served name: as set, or the last part of the model's folder, file or name."""
        return self.served_model_name or Path(self.model_source).name

    @property
    def worker(self) -> str:
        """The worker's name: as set, or host name and process id."""
        return self.worker_name or f"{socket.gethostname()}-{os.getpid()}"
