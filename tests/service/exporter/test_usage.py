"""What tenants have used, from the ends of a queue, with a bound on the number of tenants."""

from typing import Any

import pytest

from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.ends.telling import MAX_TOLD_PER_READ
from quire.records import Usage
from quire.transport.connection import connect
from service.exporter import usage
from service.exporter.queues import Inspection, QueueCollector
from service.exporter.settings import ExporterSettings
from service.exporter.usage import OTHER, UsageCounter, Used
from tests.quire.builders import claim_next, make_completion, make_item, make_request
from tests.quire.clusters import Cluster, spread
from tests.service.builders import Queue


def end(queue: Queue, name: str, *, tenant: str, used: Usage | None = None) -> None:
    """One request of the tenant ends: cancelled, or with this usage and three tokens of output."""
    queue.broker.submit(make_request(id=name, tenant=tenant))
    if used is None:
        queue.broker.cancel(name)
        return
    item = make_item(claim_next(queue.broker).claim, 0, 3)
    completion = make_completion(name, usage=used)
    changed = type(item)(item.claim, 0, item.token_ids, item.text, completion=completion)
    queue.broker.commit([changed])


def samples(collector: QueueCollector) -> dict[tuple[str, ...], float]:
    """Name and labels but the queue -> value, of what tenants have used."""
    return {
        (one.name, *(value for label, value in one.labels.items() if label != "queue")): one.value
        for family in collector.collect()
        for one in family.samples
        if "tenant_requests" in one.name or "tenant_tokens" in one.name
    }


def test_ends_count_for_their_tenants_from_the_first_scrape_on(queue: Queue):
    end(queue, "before", tenant="acme", used=Usage(prompt_tokens=3))
    settings = ExporterSettings(redis_url=queue.url, queues=(queue.name,))
    inspection = Inspection(queue.connection, settings)
    collector = QueueCollector(inspection.read, worker_fresh_seconds=1.0)
    requests, tokens = "quire_queue_tenant_requests_total", "quire_queue_tenant_tokens_total"
    assert samples(collector)[requests, OTHER] == 0
    assert (requests, "acme") not in samples(collector)
    end(queue, "a", tenant="acme", used=Usage(prompt_tokens=7, cached_tokens=4))
    end(queue, "b", tenant="acme", used=Usage(prompt_tokens=5))
    end(queue, "c", tenant="zoo")
    # Some ends of batches, which have no usage.
    queue.connection.xadd(queue.keys.ends, {"batch": "batch_1", "tenant": "acme"})
    found = [samples(collector), samples(collector)]
    assert found[0] == found[1], "each end is counted once"
    assert (found[0][requests, "acme"], found[0][requests, "zoo"]) == (2, 1)
    kinds = {kind: found[0][tokens, "acme", kind] for kind in ("prompt", "cached", "output")}
    assert kinds == {"prompt": 12, "cached": 4, "output": 6}
    assert found[0][tokens, "zoo", "prompt"] == 0


def test_the_ends_are_read_from_the_nodes_of_a_cluster(cluster: Cluster):
    queue = Queue.at(cluster.url)
    spread(cluster, queue.name, 3)
    settings = ExporterSettings(redis_url=cluster.url, queues=(queue.name,), num_shards=3)
    with connect(cluster.url) as connection:
        inspection = Inspection(connection, settings)
        inspection.read()
        for shard in range(3):
            broker = Broker(connection, queue=queue.name, shard=shard)
            broker.ensure_groups()
            broker.submit(make_request(id="a", tenant="acme"))
            broker.cancel("a")
        found = inspection.read()
    assert found.usage[queue.name]["acme"] == Used(requests=3)
    assert [view.batches for view in found.views] == [[(0, 0)] * 3]


def told(queue: Queue, *tenants: str) -> None:
    """Copies of one end, for these tenants."""
    end(queue, "one", tenant="first")
    ((_, fields),) = queue.connection.xrange(queue.keys.ends, count=1)
    with queue.connection.pipeline() as pipeline:
        for tenant in tenants:
            fields[b"tenant"] = tenant.encode()
            values: Any = fields
            pipeline.xadd(queue.keys.ends, values)
        pipeline.execute()


@pytest.mark.parametrize("most", [3, 10_000])
def test_the_tenants_beyond_a_number_count_together(queue: Queue, monkeypatch, most):
    monkeypatch.setattr(usage, "MAX_TENANTS", most)
    counter = UsageCounter(queue.connection, [queue.keys])
    counter.read()
    told(queue, *(f"t{number}" for number in range(5)), "t0", "t4")
    found = {tenant: used.requests for tenant, used in counter.read().items()}
    if most == 3:
        assert found == {OTHER: 4, "first": 1, "t0": 2, "t1": 1}
    else:
        assert found == {OTHER: 0, "first": 1, "t0": 2, "t1": 1, "t2": 1, "t3": 1, "t4": 2}


def test_a_scrape_reads_a_bounded_number_of_ends_and_the_next_one_goes_on(
    queue: Queue, monkeypatch
):
    monkeypatch.setattr(usage, "MAX_READS", 1)
    counter = UsageCounter(queue.connection, [queue.keys, Keys(queue.name, 1)])
    counter.read()
    told(queue, *["t"] * MAX_TOLD_PER_READ)
    assert counter.read()["t"].requests == MAX_TOLD_PER_READ - 1
    assert counter.read()["t"] == Used(requests=MAX_TOLD_PER_READ)
