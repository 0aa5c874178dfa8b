"""Every setting of the worker; exporter and gateway have their own modules.

Flags, variables, keys of the file and docs/reference/configuration.md come from these fields.
"""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from engine.config import PolicyName, PreemptionMode
from service.settings.combinations import refusal
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

#: The model that ships with the checkout.
EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "models" / "abacus"

#: The port of /metrics. Prometheus' exporters use 9100 to 9999, and two of them often run on the
#: same machines: the node exporter (9100) and NVIDIA's DCGM exporter (9400).
WORKER_PORT = 10_400

#: Renewals per lease: two may fail before the lease expires.
BEATS_PER_LEASE = 3
#: How long the broker repeats a failed call. Short, because each thread has its own way to wait for
#: Redis, and a call must not delay the end of the worker.
TRY_SECONDS = 0.5
#: With a shorter lease, a first renewal that is repeated for TRY_SECONDS would come too late.
MIN_LEASE_SECONDS = TRY_SECONDS * BEATS_PER_LEASE / (BEATS_PER_LEASE - 1)
#: The longest lease: for so long the requests of a dead worker wait for another one.
MAX_LEASE_SECONDS = 3600.0
#: The longest name of a worker, in characters.
MAX_NAME_LENGTH = 128
#: The shortest time without a step that may count as a stall.
MIN_STALL_SECONDS = 0.1


class Settings(ProcessSettings):
    """All settings of a worker. Frozen: an "auto" value is resolved into another object."""

    file_table: ClassVar[str] = "worker"
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "lease_seconds": (
            MIN_LEASE_SECONDS,
            f"a renewal is due after a third of it, and repeated for {TRY_SECONDS:g} seconds",
        ),
        "stall_timeout_seconds": (MIN_STALL_SECONDS, "any step would count as a stall"),
        **ProcessSettings.least_seconds,
    }
    most_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "lease_seconds": (MAX_LEASE_SECONDS, "the requests of a dead worker wait for so long"),
    }

    queue: str = setting("Queue", "Queue to serve.", default="default", pattern=QUEUE_PATTERN)
    shards: int = setting(
        "Queue", "Shards of the queue; the same for its producers.", default=1, ge=1, le=1024
    )
    served_shards: tuple[Annotated[int, Field(ge=0)], ...] = setting(
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
        "Name in the worker registry and of the stream consumer. Keep it over restarts, and give "
        "each worker of a queue another one. Unset: host name and process id.",
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

    model: str | None = setting(
        "Model",
        "Folder or Hugging Face name; unset: the checkout's `models/abacus`. A name is only looked "
        "up as a folder if it begins with `.`, `/` or `~`, has two slashes, or if its first part "
        "is an existing folder.",
        default=None,
        min_length=1,
    )
    served_model_name: str | None = setting(
        "Model",
        "Name in metrics, logs and completions; a request that names another model is rejected. "
        "Unset: the last part of `model`.",
        default=None,
        min_length=1,
    )
    adapters: Path | None = setting(
        "Model",
        "Folder of adapters (LoRA, in PEFT's format) that requests may name: each subfolder with "
        "an `adapter_config.json` is an adapter with the subfolder's name. If one cannot be "
        "served correctly, the worker does not start. Unset or empty: none.",
        default=None,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "Model", "Data type of weights and KV cache.", default="auto"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "Model", "Where the model runs.", default="auto"
    )
    model_path: Literal["auto", "fast", "wide"] = setting(
        "Model",
        "`fast` is the common decoder in one call, `wide` the model's own code; `auto` uses the "
        "fast one if its logits agree with those of the wide one.",
        default="auto",
    )
    attention_backend: Literal[
        "auto", "reference", "single-token", "cpu", "cuda", "cuda-gathered"
    ] = setting("Model", "Implementation of paged attention.", default="auto")
    deterministic: bool = setting(
        "Model",
        "A token's logits do not depend on the other requests in the batch; they are equal bit by "
        "bit. Checked at start with the model's own shapes; if the check fails, the worker does "
        "not start.",
        default=False,
    )
    async_scheduling: bool = setting(
        "Model",
        "On CUDA the next step is planned and launched while one is in flight, so that the device "
        "does not wait for the host. If off, each step waits for the tokens of the previous one.",
        default=True,
    )
    max_model_len: int | None = setting(
        "Model", "Longest prompt plus output in tokens; unset: the model's.", default=None, ge=1
    )

    block_size: int = setting("KV cache", "Tokens per block.", default=16, ge=1)
    num_blocks: int | None = setting(
        "KV cache", "Blocks on the device; unset: as many as the memory holds.", default=None, ge=1
    )
    kv_cache_memory_bytes: int | None = setting(
        "KV cache",
        "Memory for blocks on the device; unset: what is free after loading the weights.",
        default=None,
        ge=1,
    )
    num_host_blocks: int = setting(
        "KV cache",
        "Blocks in host memory for requests preempted by swap; with 0, nothing is swapped.",
        default=0,
        ge=0,
    )
    enable_prefix_caching: bool = setting(
        "KV cache", "Share the blocks of equal prompt prefixes within a tenant.", default=True
    )

    max_num_seqs: int = setting("Scheduler", "Requests running at once.", default=64, ge=1)
    max_num_batched_tokens: int | None = setting(
        "Scheduler",
        "Most tokens computed per step, prefill and decode together. A larger value serves long "
        "prompts sooner, and other requests wait longer for each token. Unset: 256 on a CPU, 2048 "
        "on a GPU, or twice `max_num_seqs` if that is more.",
        default=None,
        ge=1,
    )
    long_prefill_token_threshold: int = setting(
        "Scheduler", "Most tokens of one request per step; 0: only the budget.", default=0, ge=0
    )
    num_speculative_tokens: int = setting(
        "Scheduler",
        "Tokens of one request that are guessed and checked in one step. Guesses are taken from "
        "its prompt and output, or follow from its constraint; 0: none. Changes no output. On "
        "CUDA a step that may have guesses is launched only after the previous one has ended.",
        default=0,
        ge=0,
    )
    max_speculative_step_tokens: int = setting(
        "Scheduler", "Guesses fill a step only up to this number of tokens.", default=32, ge=0
    )
    policy: PolicyName = setting(
        "Scheduler",
        "Which request runs first. `priority`: the higher class, and within a class the earlier "
        "request. `adaptive`: like `priority`, and it prefers smaller jobs and nearer deadlines. "
        "Both preempt lower classes for higher ones. `fcfs`: the earlier request, whatever its "
        "class. `sjf`: the smaller job.",
        default="priority",
    )
    aging_seconds: float = setting(
        "Scheduler",
        "A request that has waited for this many seconds counts like one of the next higher "
        "class; under `sjf` this is the largest advantage of a small job. Age counts for waiting "
        "requests only; it does not protect a running one from preemption.",
        default=30.0,
        gt=0.0,
    )
    preemption_mode: PreemptionMode = setting(
        "Scheduler",
        "What happens to the KV of a preempted request. `recompute` drops it. `swap` copies it to "
        "host memory if it fits there (needs `num_host_blocks`). `auto` swaps from "
        "`swap_min_tokens` on, if there are `num_host_blocks`.",
        default="auto",
    )
    swap_min_tokens: int = setting(
        "Scheduler",
        "Computed tokens from which `auto` swaps instead of recomputing.",
        default=64,
        ge=0,
    )
    watermark: float = setting(
        "Scheduler",
        "Share of the blocks kept free at admission, so that running requests can grow.",
        default=0.01,
        ge=0.0,
        lt=1.0,
    )
    check_invariants: bool = setting(
        "Scheduler",
        "Check the engine's laws after every step; idle engines always do.",
        default=False,
    )

    constraint_compile_seconds: float = setting(
        "Constraints",
        "CPU time that compiling one constraint (a schema, a pattern, a grammar) may take, in a "
        "separate process; one that takes more is refused. Use the same value for all workers of "
        "a queue, so that all refuse the same constraints.",
        default=1.0,
        ge=0.05,
        le=60.0,
    )
    constraint_compile_bytes: int = setting(
        "Constraints",
        "Memory that compiling one constraint may take, in bytes; one that takes more is refused.",
        default=1 << 26,
        ge=1 << 23,
    )

    http_host: str = setting("Observability", "Address of the health server.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it when ready.",
        default=WORKER_PORT,
        ge=0,
        le=65_535,
    )
    log_level: LogLevel = setting("Observability", LOG_LEVEL_TEXT, default="info")
    log_format: LogFormat = setting("Observability", LOG_FORMAT_TEXT, default="auto")

    @field_validator("adapters", mode="before")
    @classmethod
    def _empty_means_unset(cls, value: object) -> object:
        # Compose passes a variable to a container as an empty text if it is not set.
        return value or None

    @field_validator("worker_name")
    @classmethod
    def _is_printable(cls, value: str) -> str:
        # It is shown in tables and logs, and typed on the command line of `quire drain`.
        if not value.isprintable() or value != value.strip() or len(value) > MAX_NAME_LENGTH:
            raise ValueError(
                f"must be at most {MAX_NAME_LENGTH} printable characters, without spaces at the "
                "begin or end"
            )
        return value

    @field_validator("served_shards", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_list(value)

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
        """The model to load: the folder or name that was set, or the embedded model."""
        return self.model if self.model is not None else str(EMBEDDED_MODEL)

    @property
    def model_name(self) -> str:
        """The served name: as set, or the last part of the model's folder or name."""
        return self.served_model_name or Path(self.model_source).name

    @property
    def worker(self) -> str:
        """The worker's name: as set, or host name and process id."""
        return self.worker_name or f"{socket.gethostname()}-{os.getpid()}"


def load_settings(argv: Sequence[str] | None = None) -> Settings:
    """The worker's settings, from `argv`, `os.environ` and the file: see `reading.load`.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    return load(Settings, build_parser(), argv)


def build_parser() -> argparse.ArgumentParser:
    """The worker's command line."""
    return make_parser(
        Settings,
        prog="python -m service",
        description="Run a worker: claim requests from Redis, generate, publish every token.",
        epilog="Each flag can also be set as QUIRE_<NAME> or in quire.toml; flags win.",
    )
