"""The metrics of one worker, built from the register, and bound once for all its threads."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from engine.stats import EngineSnapshot
from quire.version import quire_version
from service.shared.instruments import Instruments
from service.shared.tenants import TenantCounters
from service.worker.observe.register import families
from service.worker.observe.vitals import Vitals, WorkerState

#: Reads the device's memory in bytes by kind: allocated, reserved, total.
MemoryReader = Callable[[], Mapping[str, int]]


class Metrics:
    """The metrics of a worker's model.

    Each attribute is a bound child, or a map from label value to child. A worker of several models
    has one of these for each, made by `beside`; `of` finds that of a place.
    """

    def __init__(
        self,
        *,
        model: str,
        queue: str,
        instruments: Instruments | None = None,
    ) -> None:
        self._instruments = instruments or Instruments(families())
        self.registry = self._instruments.registry
        self._by_place: dict[int, Metrics] = {}
        self._fixed = {"model": model, "queue": queue}
        self._snapshot: EngineSnapshot | None = None
        bind = self._bind
        self.received = bind("quire_requests_received_total")
        self.finished = bind("quire_requests_finished_total")
        self.targeted = bind("quire_requests_targeted_total")
        self.resumed = bind("quire_requests_resumed_total")
        self.stream_wait_seconds = bind("quire_request_stream_wait_seconds")
        self.queue_seconds = bind("quire_request_queue_seconds")
        self.first_token_seconds = bind("quire_time_to_first_token_seconds")
        self.inter_token_seconds = bind("quire_inter_token_latency_seconds")
        self.prefill_seconds = bind("quire_request_prefill_seconds")
        self.decode_seconds = bind("quire_request_decode_seconds")
        self.e2e_seconds = bind("quire_request_e2e_seconds")
        self.request_prompt_tokens = bind("quire_request_prompt_tokens")
        self.request_generation_tokens = bind("quire_request_generation_tokens")
        self.violations = bind("quire_engine_violations_total")
        self.publish_seconds = bind("quire_publish_seconds")
        self.publish_entries = bind("quire_publish_entries")
        self.publish_backlog = bind("quire_publish_backlog_tokens")
        self.rewinds = bind("quire_publish_rewinds_total")
        self.fenced = bind("quire_publish_fenced_total")
        self.redis_errors = bind("quire_redis_errors_total")
        self.reaped = bind("quire_leases_reaped_total")
        self.restored = bind("quire_requests_restored_total")
        self.dead_lettered = bind("quire_messages_dead_lettered_total")
        self.published_tokens = bind("quire_published_tokens_total")
        self.tenant_tokens = TenantCounters(
            self._instruments.get("quire_tenant_tokens_total"), model=model
        )
        self.switches = bind("quire_worker_model_switches_total")
        self.switch_seconds = bind("quire_worker_model_switch_seconds")
        self.models_loaded = bind("quire_worker_models_loaded")
        self._bind_engine()
        self._read_at_scrape()

    def _bind_engine(self) -> None:
        bind = self._bind
        self._prompt_tokens = bind("quire_prompt_tokens_total")
        self._generation_tokens = bind("quire_generation_tokens_total")
        self._draft_tokens = bind("quire_draft_tokens_total")
        self._requests = bind("quire_engine_requests")
        self._steps = bind("quire_engine_steps_total")
        self._step_seconds = bind("quire_engine_step_seconds")
        self._step_tokens = bind("quire_engine_step_tokens")
        self._failed_steps = bind("quire_engine_failed_steps_total")
        self._last_step = bind("quire_engine_last_step_timestamp_seconds")
        self._state = bind("quire_engine_state")
        self._overdue = bind("quire_threads_overdue")
        self._preemptions = bind("quire_preemptions_total")
        self._preempted_tokens = bind("quire_preempted_tokens_total")
        self._blocks = bind("quire_kv_cache_blocks")
        self._usage = bind("quire_kv_cache_usage_ratio")
        self._computed_tokens = bind("quire_engine_computed_tokens_total")
        self._batch_usage = bind("quire_engine_batch_usage_ratio")
        self._slot_usage = bind("quire_engine_slot_usage_ratio")
        self._promised_blocks = bind("quire_kv_cache_promised_blocks")
        self._host_blocks = bind("quire_kv_cache_host_blocks")
        self._swapped_requests = bind("quire_kv_cache_swapped_requests")
        self._cache_bytes = bind("quire_kv_cache_bytes")

    def beside(self, *, model: str, queue: str, places: Iterable[int]) -> "Metrics":
        """The metrics of another model of this worker, which has these places."""
        other = Metrics(model=model, queue=queue, instruments=self._instruments)
        self._by_place |= dict.fromkeys(places, other)
        return other

    def of(self, place: int) -> "Metrics":
        """The metrics of the model of a place."""
        return self._by_place.get(place, self)

    def begin_engine(self, now: EngineSnapshot) -> None:
        """Count from this snapshot on: an engine that was loaded anew begins at 0."""
        self._snapshot = now

    def observe_engine(self, now: EngineSnapshot) -> None:
        """Update the metrics from a new snapshot; called once after every step.

        Takes a dozen microseconds on the engine thread, most of them for the two histograms of a
        step. The gauges are read from the snapshot at each scrape.
        """
        before, self._snapshot = self._snapshot, now
        computed = now.prompt_tokens - now.cached_prompt_tokens
        if before is not None:
            computed -= before.prompt_tokens - before.cached_prompt_tokens
        _advance(self._prompt_tokens["computed"], computed, 0)
        for counter, name in self._counters:
            _advance(counter, getattr(now, name), getattr(before, name) if before else 0)
        step = now.last_step
        if step is not None and (before is None or now.steps > before.steps):
            self._steps[step.kind].inc()
            self._step_seconds[step.kind].observe(step.seconds)
            self._step_tokens.observe(step.num_tokens)
            self._last_step.set(time.time())

    def watch_state(self, vitals: Vitals, *, is_served: Callable[[], bool]) -> None:
        """Export the worker's state and the overdue threads, read at each scrape.

        Of several models only the one that is served has a state, so that workers can be counted.
        """
        for state in WorkerState:
            self._state[state].set_function(
                lambda state=state: float(vitals.state is state and is_served())
            )

        def num_overdue(kind: str) -> float:
            return float(sum(late.thread.partition("-")[0] == kind for late in vitals.overdue))

        for kind, gauge in self._overdue.items():
            gauge.set_function(partial(num_overdue, kind))

    def watch_memory(self, device: str, read: MemoryReader) -> None:
        """Export the device's memory, read at each scrape; 0 if it cannot be read.

        An error of the device must not fail the scrape, because other metrics show that error.
        """

        def bytes_of(kind: str) -> float:
            try:
                return float(read().get(kind, 0))
            except Exception:  # noqa: BLE001 - a driver may raise anything.
                return 0.0

        gauges = self._bind("quire_device_memory_bytes", device=device)
        for kind, gauge in gauges.items():
            gauge.set_function(partial(bytes_of, kind))

    def watch_threads(self, read: Callable[[], int]) -> None:
        """Export the number of threads that compute a step, read at each scrape."""
        self._bind("quire_engine_threads").set_function(lambda: float(read()))

    def describe(
        self, *, build: Mapping[str, str], sizes: Mapping[str, int], cache_bytes: Mapping[str, int]
    ) -> None:
        """Export what is running, with which sizes, and what the KV cache takes.

        `cache_bytes` has the keys of the label `of` of quire_kv_cache_bytes.
        """
        for part, gauge in self._cache_bytes.items():
            gauge.set(cache_bytes.get(part, 0))
        labels = dict.fromkeys(families()["quire_build_info"].labels, "unknown")
        known = {"version": quire_version(), **build}
        self._bind("quire_build_info", **(labels | known)).set(1)
        texts = {name: str(value) for name, value in sizes.items()}
        self._bind("quire_engine_config_info", **texts).set(1)

    @property
    def _counters(self) -> tuple[tuple[Any, str], ...]:
        """Each counter with the attribute of the snapshot that it follows."""
        return (
            (self._prompt_tokens["cached"], "cached_prompt_tokens"),
            (self._generation_tokens, "generated_tokens"),
            (self._draft_tokens["accepted"], "accepted_draft_tokens"),
            (self._draft_tokens["rejected"], "rejected_draft_tokens"),
            (self._failed_steps, "failed_steps"),
            (self._preemptions["recompute"], "preemptions_recompute"),
            (self._preemptions["swap"], "preemptions_swap"),
            (self._preempted_tokens, "preempted_tokens"),
            (self._computed_tokens["prefill"], "prefill_tokens"),
            (self._computed_tokens["decode"], "decode_tokens"),
            (self._computed_tokens["draft"], "drafted_tokens"),
        )

    def _read_at_scrape(self) -> None:
        for gauge, name in (
            (self._requests["running"], "num_running"),
            (self._requests["waiting"], "num_waiting"),
            (self._requests["preempted"], "num_preempted"),
            (self._blocks["used"], "num_owned_blocks"),
            (self._blocks["cached"], "num_cached_blocks"),
            (self._blocks["free"], "num_blank_blocks"),
            (self._usage, "kv_cache_usage"),
            (self._batch_usage, "batch_usage"),
            (self._slot_usage, "slot_usage"),
            (self._promised_blocks, "num_promised_blocks"),
            (self._host_blocks["used"], "num_owned_host_blocks"),
            (self._host_blocks["free"], "num_free_host_blocks"),
            (self._swapped_requests, "num_swapped"),
        ):
            gauge.set_function(lambda name=name: float(getattr(self._snapshot, name, 0)))

    def _bind(self, name: str, **labels: str) -> Any:
        return self._instruments.bind(name, **{**self._fixed, **labels})


def _advance(counter: Any, now: int, before: int) -> None:
    if now > before:
        counter.inc(now - before)
