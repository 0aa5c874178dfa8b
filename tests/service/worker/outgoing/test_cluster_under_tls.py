"""A worker on a cluster under TLS."""

from collections.abc import Iterator

import pytest

from quire.client.client import Client
from quire.errors import BrokerUnavailable
from quire.queue.broker import Broker
from quire.transport.connection import connect
from tests.quire.certificates import has_tls, make_certificate
from tests.quire.clusters import Cluster, spread
from tests.quire.servers import real_program
from tests.service.builders import Queue, WorkerThread
from tests.service.worker.outgoing.test_cluster import judge, submit


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    program = real_program()
    if not has_tls(program):
        pytest.skip(f"{program} was built without TLS")
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder)
    with Cluster(program, certificate=folder / "cert.pem") as made:
        yield made


@pytest.mark.distribution
def test_a_cluster_under_tls_is_served_for_those_who_trust_it(secured: Cluster):
    queue = Queue.at(secured.url)
    assert len(set(spread(secured, queue.name, 3).values())) == 3
    with Client(secured.url, queue=queue.name, shards=3) as client:
        prompts = submit(client, count=12, max_tokens=8, shards=3)
        with WorkerThread(queue.settings(shards=3, max_num_seqs=32)):
            judge(client, prompts, max_tokens=8)
    stranger = secured.url.partition("?")[0]
    with connect(stranger) as connection, pytest.raises(BrokerUnavailable, match="ssl_ca_certs"):
        Broker(connection, queue="tls", retry_seconds=0.1).status("a")
