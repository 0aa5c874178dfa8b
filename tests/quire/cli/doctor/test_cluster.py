import json
import secrets

import pytest
import redis
from redis.exceptions import ResponseError

from quire.keys import Keys
from tests.quire.clusters import Cluster, spread

pytestmark = pytest.mark.real_redis


def findings(quire, cluster: Cluster, queue: str) -> tuple[int, list[dict[str, str]]]:
    flags = ("--redis-url", cluster.url, "--queue", queue, "--shards", "3")
    code, out, _ = quire("doctor", "--no-torch", "--json", *flags)
    return code, [json.loads(line) for line in out.splitlines()]


def test_doctor_says_which_node_has_which_shard(quire, cluster: Cluster):
    queue = f"test-{secrets.token_hex(6)}"
    placed = spread(cluster, queue, 3)
    cluster.move(Keys(queue, 1), placed[0])
    code, found = findings(quire, cluster, queue)
    (of_cluster,) = [one for one in found if one["check"] == "cluster"]
    assert code == 0
    assert of_cluster["detail"].startswith("3 masters: ")
    assert f"127.0.0.1:{placed[0].port} has shards 0, 1" in of_cluster["detail"]
    assert f"127.0.0.1:{placed[1].port} has no shard" in of_cluster["detail"]
    assert f"127.0.0.1:{placed[2].port} has shard 2" in of_cluster["detail"]
    # No master of these tests has a replica, and each is named.
    alone = [one["detail"] for one in found if one["check"] == "replicas"]
    assert sorted(alone) == sorted(f"127.0.0.1:{node.port}: none" for node in cluster.nodes)


def test_doctor_names_what_a_managed_service_leaves_out(quire, cluster: Cluster, monkeypatch):
    execute = redis.Redis.execute_command

    def managed(self, *words, **options):
        if words[0] == "EVALSHA" or words[:2] == ("CLUSTER", "SHARDS"):
            raise ResponseError("unknown command")
        return execute(self, *words, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", managed)
    code, found = findings(quire, cluster, f"test-{secrets.token_hex(6)}")
    checks = {one["check"]: one for one in found}
    assert code == 1
    assert checks["unknown scripts"]["verdict"] == "fail"
    assert "must answer it" in checks["unknown scripts"]["advice"]
    assert "CLUSTER SLOTS is used" in checks["cluster commands"]["detail"]
    version = cluster.nodes[0].client.info("server")["redis_version"]
    has_waitaof = tuple(map(int, version.split(".")[:2])) >= (7, 2)
    assert ("durable writes" in checks) is not has_waitaof


def test_doctor_says_that_a_slot_has_no_node(quire, cluster: Cluster, monkeypatch):
    execute = redis.Redis.execute_command

    def uncovered(self, *words, **options):
        if words == ("CLUSTER", "INFO"):
            return b"cluster_state:fail\r\ncluster_slots_ok:16000\r\n"
        return execute(self, *words, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", uncovered)
    code, found = findings(quire, cluster, f"test-{secrets.token_hex(6)}")
    states = [one for one in found if one["check"] == "cluster state"]
    assert code == 1
    assert len(states) == 3
    assert "16000 of 16384 slots served" in states[0]["detail"]
