"""The register against what is exported and what is documented; then what a workload counts."""

import re
import time
import tomllib

import pytest

from ops.pages import metrics_page
from ops.pages.config_page import render_markdown
from service.shared.families import PHASES
from service.worker.observe import register
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from tests.service.builders import CHECKOUT, Queue, StepGate, WorkerThread, eventually

#: What every Prometheus client of Python brings along.
LIBRARY_PREFIXES = ("python_", "process_")


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(model="abacus", queue="default")
    metrics.watch_state(Vitals(stall_timeout_seconds=1.0), is_served=lambda: True)
    metrics.watch_memory("cpu", dict)
    metrics.watch_threads(lambda: 2)
    sizes = {"max_num_seqs": 1, "block_size": 2, "num_blocks": 3}
    metrics.describe(build={"device": "cpu"}, sizes=sizes, cache_bytes={"block": 7, "host": 21})
    return metrics


def exported(metrics: Metrics) -> dict[str, object]:
    """Families by the name the register gives them."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in metrics.registry.collect()
        if not family.name.startswith(LIBRARY_PREFIXES)
    }


def test_every_metric_of_the_register_is_exported_and_no_other(metrics: Metrics):
    assert exported(metrics).keys() == register.families().keys()


def test_the_build_has_the_version_of_the_project(metrics: Metrics):
    (sample,) = exported(metrics)["quire_build_info"].samples
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert sample.labels["version"] == project["version"]


def test_the_sizes_of_an_engine_and_of_its_cache_are_told(metrics: Metrics):
    sizes = {"max_num_seqs": "1", "block_size": "2", "num_blocks": "3"}
    assert metrics.registry.get_sample_value("quire_engine_config_info", sizes) == 1
    told = {
        part: metrics.registry.get_sample_value(
            "quire_kv_cache_bytes", {"model": "abacus", "of": part}
        )
        for part in ("block", "device", "host")
    }
    assert told == {"block": 7, "device": 0, "host": 21}


def test_a_worker_says_when_its_process_began(queue: Queue):
    with WorkerThread(queue.settings()) as worker:
        began = worker.metric("process_start_time_seconds")
        assert time.time() - 86_400 < began <= time.time()


def test_kinds_and_meanings_are_those_of_the_register(metrics: Metrics):
    for name, family in register.families().items():
        found = exported(metrics)[name]
        assert (found.type, found.documentation) == (family.kind, family.meaning)


def test_every_label_value_exists_from_the_first_scrape(metrics: Metrics):
    for name, family in register.families().items():
        expected = 1
        for closed in family.labels.values():
            expected *= len(closed) or 1
        sets = {
            tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            for sample in exported(metrics)[name].samples
        }
        assert len(sets) == expected, name


def test_names_follow_the_rules_of_prometheus():
    for name, family in register.families().items():
        assert re.fullmatch(r"quire_[a-z0-9_]+", name)
        assert name.endswith("_total") == (family.kind == "counter")
        assert bool(family.buckets) == (family.kind == "histogram")
        assert list(family.buckets) == sorted(set(family.buckets))
        assert family.meaning.endswith(".")
        # Labels whose values callers choose would make any number of time series. The one counter
        # by tenant has a bound, see test_tenants.py.
        unbounded = {"request_id", "user", "error"}
        unbounded |= {"tenant"} if name != "quire_tenant_tokens_total" else set()
        assert not unbounded & family.labels.keys()


def test_the_metrics_page_of_the_documentation_is_the_register():
    documented = (CHECKOUT / "docs" / "reference" / "metrics.md").read_text()
    assert documented == metrics_page.render_markdown(), "run: python -m ops.pages.metrics_page"


def test_the_configuration_page_of_the_documentation_is_the_settings():
    documented = (CHECKOUT / "docs" / "reference" / "configuration.md").read_text()
    assert documented == render_markdown(), "run: python -m ops.pages.config_page"


def test_a_workload_is_counted_once_in_every_metric_it_touches(queue: Queue):
    ids = [queue.submit((n, 2, 3), max_tokens=10, priority="high") for n in (1, 2, 3)]
    model = {"model": "fake"}
    with WorkerThread(queue.settings()) as worker:
        for request_id in ids:
            queue.result(request_id)
        # An engine counts a step after its outputs are on their way, and then looks at its books.
        eventually(lambda: not worker.worker.vitals.is_busy)
    # Now the publisher has observed the last one, too.
    finished = {**model, "outcome": "length"}
    assert worker.metric("quire_requests_finished_total", **finished) == 3
    received = {**model, "queue": queue.name, "priority": "high"}
    assert worker.metric("quire_requests_received_total", **received) == 3
    assert worker.metric("quire_generation_tokens_total", **model) == 30
    assert worker.metric("quire_published_tokens_total", **model, priority="high") == 30
    assert worker.metric("quire_published_tokens_total", **model, priority="low") == 0
    assert worker.metric("quire_tenant_tokens_total", **model, tenant="default") == 30
    computed = {**model, "source": "computed"}
    assert worker.metric("quire_prompt_tokens_total", **computed) == 9
    for name in (
        "quire_request_queue_seconds",
        "quire_time_to_first_token_seconds",
        "quire_request_prefill_seconds",
        "quire_request_decode_seconds",
        "quire_request_prompt_tokens",
        "quire_request_generation_tokens",
    ):
        assert worker.metric(f"{name}_count", **model) == 3, name
    assert worker.metric("quire_time_to_first_token_seconds_sum", **model) > 0
    assert worker.metric("quire_inter_token_latency_seconds_count", **model) == 3 * 9
    assert worker.metric("quire_request_generation_tokens_sum", **model) == 30
    e2e = {**model, "priority": "high"}
    assert worker.metric("quire_request_e2e_seconds_count", **e2e) == 3
    steps = sum(worker.metric("quire_engine_steps_total", phase=phase, **model) for phase in PHASES)
    assert worker.metric("quire_engine_step_tokens_count", **model) == steps >= 10
    blocks = {
        state: worker.metric("quire_kv_cache_blocks", state=state, **model)
        for state in ("used", "cached", "free")
    }
    assert sum(blocks.values()) == 512
    assert blocks["used"] == 0
    assert worker.metric("quire_engine_violations_total", **model) == 0
    assert worker.metric("quire_publish_backlog_tokens") == 0


def test_the_time_in_the_queue_is_part_of_the_whole_and_not_of_the_first_token(queue: Queue):
    request_id = queue.submit(max_tokens=3)
    an_hour_ago = queue.broker.now_ms() - 3_600_000
    queue.connection.hset(queue.keys.request(request_id), "submitted_ms", an_hour_ago)
    model = {"model": "fake"}
    with WorkerThread(queue.settings()) as worker:
        queue.result(request_id)
        whole = {**model, "priority": "normal"}
        eventually(lambda: worker.metric("quire_request_e2e_seconds_count", **whole) == 1)
        assert worker.metric("quire_request_e2e_seconds_sum", **whole) >= 3600
        for part in ("time_to_first_token", "request_queue", "request_prefill", "request_decode"):
            assert worker.metric(f"quire_{part}_seconds_sum", **model) < 3600, part


@pytest.mark.parametrize("found", ["by its claim", "by the keeper"])
def test_a_request_whose_deadline_passes_in_the_queue_is_counted_too(queue: Queue, found: str):
    request_id = queue.submit(deadline_ms=1)
    if found == "by the keeper":
        queue.broker.pause("nobody claims")
    else:
        # The keeper looks there for those that wait.
        queue.connection.zrem(queue.keys.wait, request_id)
    with WorkerThread(queue.settings()) as worker:
        assert queue.result(request_id).completion.finish_reason == "deadline"
        worker.wait_for_end("deadline")


def test_requests_in_the_engine_are_seen_by_state(queue: Queue):
    gate = StepGate(steps=0)
    for n in range(5):
        queue.submit((n + 1,), max_tokens=200)
    with WorkerThread(queue.settings(max_num_seqs=2), before_run=gate) as worker:
        state = {"model": "fake", "state": "running"}
        gate.step_until(lambda: worker.metric("quire_engine_requests", **state) == 2)
        gate.open()
        eventually(lambda: worker.metric("quire_engine_requests", **state) == 0)


def test_requests_are_seen_in_an_engine_that_hangs_in_the_first_step_it_has_for_them(queue: Queue):
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        request_id = queue.submit((1, 2), max_tokens=2)
        gate.wait_for_arrival()
        waiting = {"model": "fake", "state": "waiting"}
        assert worker.metric("quire_engine_requests", **waiting) == 1
        gate.open()
        queue.result(request_id)
        eventually(lambda: worker.metric("quire_engine_requests", **waiting) == 0)
