"""What a scraper is told of the engine: every number of a snapshot, under its own name."""

import time

import pytest
from prometheus_client import generate_latest

from engine.stats import EngineSnapshot, StepStats
from service.worker.observe.metrics import Metrics

#: All numbers differ, so that none can stand for another.
FIRST = EngineSnapshot(
    max_num_seqs=10, max_num_batched_tokens=280,
    num_waiting=3, num_running=5, num_preempted=2, num_blocks=200, num_blank_blocks=110,
    num_cached_blocks=40, num_owned_blocks=50, num_promised_blocks=9, num_host_blocks=20,
    num_owned_host_blocks=8, num_swapped=12, prefill_tokens=65, decode_tokens=333,
    drafted_tokens=77, preemptions_recompute=6, preemptions_swap=7, preempted_tokens=81,
    prompt_tokens=1000, cached_prompt_tokens=320, generated_tokens=457, steps=31, failed_steps=4,
    accepted_draft_tokens=61, rejected_draft_tokens=17,
    last_step=StepStats("mixed", num_rows=5, num_tokens=70, num_prefill_tokens=65,
        num_decode_tokens=4, seconds=0.25),
)  # fmt: skip
SECOND = EngineSnapshot(
    max_num_seqs=10, max_num_batched_tokens=280,
    num_waiting=1, num_running=6, num_preempted=0, num_blocks=200, num_blank_blocks=100,
    num_cached_blocks=30, num_owned_blocks=70, num_promised_blocks=1, num_host_blocks=20,
    num_owned_host_blocks=0, num_swapped=14, prefill_tokens=66, decode_tokens=339,
    drafted_tokens=78, preemptions_recompute=8, preemptions_swap=12, preempted_tokens=99,
    prompt_tokens=1500, cached_prompt_tokens=450, generated_tokens=500, steps=32, failed_steps=5,
    accepted_draft_tokens=63, rejected_draft_tokens=29,
    last_step=StepStats("decode", num_rows=6, num_tokens=7, num_prefill_tokens=0,
        num_decode_tokens=6, seconds=0.125),
)  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(model="m", queue="q")


def read(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"quire_{name}", {"model": "m", **labels})


def told_of(metrics: Metrics) -> dict[str, float | None]:
    return {
        "running": read(metrics, "engine_requests", state="running"),
        "waiting": read(metrics, "engine_requests", state="waiting"),
        "preempted": read(metrics, "engine_requests", state="preempted"),
        "used": read(metrics, "kv_cache_blocks", state="used"),
        "cached": read(metrics, "kv_cache_blocks", state="cached"),
        "free": read(metrics, "kv_cache_blocks", state="free"),
        "usage": read(metrics, "kv_cache_usage_ratio"),
        "prompt, computed": read(metrics, "prompt_tokens_total", source="computed"),
        "prompt, cached": read(metrics, "prompt_tokens_total", source="cached"),
        "generated": read(metrics, "generation_tokens_total"),
        "guessed right": read(metrics, "draft_tokens_total", outcome="accepted"),
        "guessed wrong": read(metrics, "draft_tokens_total", outcome="rejected"),
        "recomputed": read(metrics, "preemptions_total", mode="recompute"),
        "swapped": read(metrics, "preemptions_total", mode="swap"),
        "given up": read(metrics, "preempted_tokens_total"),
        "failed": read(metrics, "engine_failed_steps_total"),
        "prefill": read(metrics, "engine_computed_tokens_total", kind="prefill"),
        "decode": read(metrics, "engine_computed_tokens_total", kind="decode"),
        "draft": read(metrics, "engine_computed_tokens_total", kind="draft"),
        "batch": read(metrics, "engine_batch_usage_ratio"),
        "slots": read(metrics, "engine_slot_usage_ratio"),
        "promised": read(metrics, "kv_cache_promised_blocks"),
        "host, used": read(metrics, "kv_cache_host_blocks", state="used"),
        "host, free": read(metrics, "kv_cache_host_blocks", state="free"),
        "swapped requests": read(metrics, "kv_cache_swapped_requests"),
    }


def test_every_number_of_a_snapshot_is_told_under_its_name(metrics: Metrics):
    metrics.observe_engine(FIRST)
    assert told_of(metrics) == {
        "running": 5, "waiting": 3, "preempted": 2, "used": 50, "cached": 40, "free": 110,
        "usage": 0.25, "prompt, computed": 680, "prompt, cached": 320, "generated": 457,
        "guessed right": 61, "guessed wrong": 17,
        "recomputed": 6, "swapped": 7, "given up": 81, "failed": 4,
        "prefill": 65, "decode": 333, "draft": 77, "batch": 0.25, "slots": 0.5, "promised": 9,
        "host, used": 8, "host, free": 12, "swapped requests": 12,
    }  # fmt: skip
    metrics.observe_engine(SECOND)
    assert told_of(metrics) == {
        "running": 6, "waiting": 1, "preempted": 0, "used": 70, "cached": 30, "free": 100,
        "usage": 0.35, "prompt, computed": 1050, "prompt, cached": 450, "generated": 500,
        "guessed right": 63, "guessed wrong": 29,
        "recomputed": 8, "swapped": 12, "given up": 99, "failed": 5,
        "prefill": 66, "decode": 339, "draft": 78, "batch": 0.025, "slots": 0.6, "promised": 1,
        "host, used": 0, "host, free": 20, "swapped requests": 14,
    }  # fmt: skip


def test_a_step_is_told_once_by_what_it_was_made_of(metrics: Metrics):
    began = time.time()
    for snapshot in (FIRST, SECOND, SECOND):
        metrics.observe_engine(snapshot)
    steps = {
        p: read(metrics, "engine_steps_total", phase=p) for p in ("prefill", "mixed", "decode")
    }
    assert steps == {"prefill": 0, "mixed": 1, "decode": 1}
    assert read(metrics, "engine_step_seconds_sum", phase="mixed") == 0.25
    assert read(metrics, "engine_step_seconds_sum", phase="decode") == 0.125
    assert read(metrics, "engine_step_tokens_sum") == 77
    assert began <= (read(metrics, "engine_last_step_timestamp_seconds") or 0) <= time.time()


def test_a_device_that_cannot_be_asked_takes_no_other_metric_along(metrics: Metrics):
    def ask() -> dict[str, int]:
        raise RuntimeError("device-side assert triggered")

    metrics.watch_memory("cuda:0", ask)
    metrics.observe_engine(FIRST)
    scraped = generate_latest(metrics.registry).decode()
    assert 'quire_device_memory_bytes{device="cuda:0",kind="total"} 0.0' in scraped
    assert 'quire_generation_tokens_total{model="m"} 457.0' in scraped
