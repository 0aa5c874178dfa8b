"""What the exporter tells of the tenants of a queue: how many there are, and never their names."""

from prometheus_client.parser import text_string_to_metric_families

from quire.queue.control.limits import QueueLimits
from quire.queue.rank.fairness import Fairness
from quire.wire.protocol import GenerationRequest
from service.exporter.queues import Exporter
from service.exporter.settings import ExporterSettings
from tests.service.builders import Queue, http_get

BODY = {"prompt": [1, 2, 3], "max_tokens": 97}


def submit(queue: Queue, *tenants: str) -> None:
    queue.broker.submit_many(
        [
            GenerationRequest(kind="tokens", body=BODY, priority="high", tenant=tenant)
            for tenant in tenants
        ]
    )


def seen(exporter: Exporter) -> dict[tuple[str, str], float]:
    """By the name without its prefix and the last label: of classes only `high`."""
    _, text = http_get(exporter.http_port, "/metrics")
    return {
        (sample.name.removeprefix("quire_queue_"), sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.name or "shared" in sample.name
        if sample.labels.get("priority", "high") == "high" and not sample.name.endswith("_total")
    }


def test_how_tenants_share_a_queue_is_told_without_their_names(queue: Queue):
    settings = ExporterSettings(redis_url=queue.url, queues=(queue.name,), http_port=0)
    exporter = Exporter(settings)
    exporter.start()
    try:
        submit(queue, "default")
        assert seen(exporter) == {
            ("shared_by_tokens", ""): 0,
            ("tenants", "open"): 1,
            ("tenants", "limited"): 0,
            ("tenant_ahead_tokens", ""): 0,
        }
        queue.broker.set_fairness(Fairness(by_tokens=True))
        queue.broker.set_limits(QueueLimits(rates={"b": 10}))
        submit(queue, "a", "a", "b")
        assert seen(exporter) == {
            ("shared_by_tokens", ""): 1,
            ("tenants", "open"): 3,
            ("tenants", "limited"): 1,
            ("tenant_ahead_tokens", ""): 200,
        }
    finally:
        exporter.stop()
