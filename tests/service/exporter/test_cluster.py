"""A gateway and an exporter whose queue is on the nodes of a cluster."""

from prometheus_client.parser import text_string_to_metric_families

from quire import AsyncClient
from service.exporter.queues import Exporter
from service.exporter.settings import ExporterSettings
from tests.quire.clusters import Cluster, spread
from tests.service.builders import Queue, WorkerThread, http_get
from tests.service.gateway.builders import GatewayThread

NUM_SHARDS = 3


def scraped(exporter: Exporter) -> list[tuple[str, float]]:
    status, text = http_get(exporter.http_port, "/metrics")
    assert status == 200
    return [
        (sample.name, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def test_calls_are_answered_and_counted_from_every_node(cluster: Cluster):
    queue = Queue.at(cluster.url)
    spread(cluster, queue.name, NUM_SHARDS)

    def client() -> AsyncClient:
        return AsyncClient(cluster.url, queue=queue.name, shards=NUM_SHARDS)

    exporter = Exporter(
        ExporterSettings(
            redis_url=cluster.url, queues=(queue.name,), num_shards=NUM_SHARDS, http_port=0
        )
    )
    exporter.start()
    try:
        # It counts the ends from its first look on.
        assert ("quire_exporter_up", 1.0) in scraped(exporter)
        settings = queue.settings(shards=NUM_SHARDS)
        with WorkerThread(settings), GatewayThread(client) as gateway:
            for _ in range(12):
                reply = gateway.complete(max_tokens=4)
                assert (reply.status, reply.body["usage"]["completion_tokens"]) == (200, 4)
        samples = scraped(exporter)
    finally:
        exporter.stop()
    ended = [value for name, value in samples if name == "quire_queue_tenant_requests_total"]
    assert sum(ended) == 12
