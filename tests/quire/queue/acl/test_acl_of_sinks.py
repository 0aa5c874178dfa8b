"""The users of docs/reference/acl.md that read the ends of a queue: sinks and exporters."""

import pytest

from quire import Client
from service.exporter.queues import Inspection
from service.exporter.settings import ExporterSettings
from tests.quire.builders import make_request
from tests.quire.queue.acl.roles import refused

#: What is forbidden is said in other words by other servers.
pytestmark = [pytest.mark.real_redis, pytest.mark.distribution]


def test_a_sink_reads_the_ends_and_nothing_else(as_role, real_broker):
    for name in "abc":
        real_broker.submit(make_request(id=name))
        real_broker.cancel(name)
    broker = as_role("sink")
    client = Client(broker)
    assert [end.request_id for end in client.ends(timeout=0.01)] == ["a", "b", "c"]
    sink = client.ends(group="sinks", consumer="one", timeout=0.01)
    assert next(sink).request_id == "a"
    sink.close()
    assert broker.take_over("sinks", "two", idle_seconds=0).ends[0].request_id == "a"
    for call in (
        lambda: client.submit("x"),
        lambda: client.cancel("a"),
        lambda: client.status("a"),
        broker.pause,
        lambda: broker.keep_ends(0),
    ):
        refused(call)


def test_an_exporter_reads_everything_that_it_tells_as_an_observer(as_role, real_broker):
    observer = as_role("observer")
    settings = ExporterSettings(redis_url="redis://unused", queues=(observer.keys.queue,))
    inspection = Inspection(observer.connection, settings)
    inspection.read()
    real_broker.submit(make_request(id="a", tenant="acme"))
    real_broker.cancel("a")
    found = inspection.read()
    assert found.usage[observer.keys.queue]["acme"].requests == 1
    assert [view.batches for view in found.views] == [[(0, 0)]]
    assert found.memory is not None
