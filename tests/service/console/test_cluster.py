"""A console whose queue is on the nodes of a cluster."""

from quire import Broker, connect
from quire.queue.control.limits import QueueLimits
from quire.records import State
from service.console.pages import PAGES, Parameters, Watched
from service.console.reading.history import History
from service.console.reading.queue import QueueReading
from tests.quire.builders import claim_next, make_item, make_request
from tests.quire.clusters import Cluster, spread

NUM_SHARDS = 3


def test_every_shard_is_on_the_pages_and_in_the_history(cluster: Cluster):
    spread(cluster, "shown", NUM_SHARDS)
    with connect(cluster.url) as connection:
        queue = QueueReading(connection, "shown", shards=NUM_SHARDS)
        history = History(queue, sample_seconds=10.0)
        for shard in range(NUM_SHARDS):
            broker = Broker(connection, queue="shown", shard=shard)
            broker.set_limits(QueueLimits(tokens=9000))
            broker.submit_many([make_request(), make_request()])
            broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
        history.read()
        contexts = {
            page.name: page.context(Watched(queue, history), Parameters())
            for page in PAGES
            if page.name not in ("request", "group")
        }
    (sample,) = history.samples
    assert (sample.num_waiting, sample.ended) == (NUM_SHARDS, {State.COMPLETED: NUM_SHARDS})
    assert contexts["overview"]["view"].total("num_queued") == NUM_SHARDS
    limits = contexts["limits"]["view"]
    assert [one.limits.tokens for one in limits.control] == [9000] * NUM_SHARDS
    assert limits.num_open == {"default": NUM_SHARDS}
