"""Users of docs/reference/acl.md on a cluster."""

import secrets

import pytest

from quire import Client
from quire.errors import BrokerUnavailable
from quire.keys import Keys
from tests.quire.cluster.test_moves import half_moved
from tests.quire.clusters import Cluster, another
from tests.quire.queue.acl.roles import ROLES
from tests.quire.servers import needs_version_7

pytestmark = pytest.mark.real_redis


def test_a_user_needs_one_right_more(cluster: Cluster):
    needs_version_7(cluster.nodes[0].client)
    queue, name = f"test-{secrets.token_hex(6)}", f"user-{secrets.token_hex(4)}"
    keys = Keys(queue)
    url = cluster.url.replace("://", f"://{name}:change-me@")
    rules = [rule.replace("{default.", f"{{{queue}.") for rule in ROLES["producer"]]

    def create(*more: str) -> None:
        for node in cluster.nodes:
            node.call("ACL", "SETUSER", name, "reset", *rules, *more)

    create()
    with Client(url, queue=queue) as client, pytest.raises(BrokerUnavailable, match="not allow"):
        client.submit("hello")
    create("+cluster|slots")
    with Client(url, queue=queue) as client:
        handle = client.submit("hello")
        cluster.move(keys, another(cluster, cluster.owner(keys)))
        assert handle.status().state == "queued"
        with half_moved(cluster, keys, keys.request(handle.request_id)):
            assert handle.status().state == "queued"
    for node in cluster.nodes:
        node.call("ACL", "DELUSER", name)
