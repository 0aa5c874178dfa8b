"""`quire doctor` and `quire status` name what a server has lost, and a server that is about to."""

import pytest
import redis

from quire.queue.repair.losses import inspect_losses
from quire.queue.repair.restore import Lost
from tests.quire.builders import claim_next, make_request
from tests.quire.cli.test_cli import records

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


def found(quire, check):
    code, out, _ = quire("doctor", "--no-torch", "--json")
    return code, [finding for finding in records(out) if finding["check"] == check]


def trim(connection, broker):
    connection.delete(*broker.keys.all_ranks)
    for stream in broker.keys.all_ingress:
        connection.xtrim(stream, maxlen=0, approximate=False)


def test_doctor_names_requests_that_nothing_leads_to(quire, real_broker, real_connection):
    real_broker.submit_many([make_request(id=f"r{number}") for number in range(30)])
    where = f"on shard 0 of queue {real_broker.keys.queue!r}"
    (finding,) = found(quire, "open requests")[1]
    assert (finding["verdict"], finding["detail"]) == ("ok", f"30 {where}, none of them lost")
    trim(real_connection, real_broker)
    code, (finding,) = found(quire, "open requests")
    assert (code, finding["verdict"]) == (1, "fail")
    assert finding["detail"].startswith(f"30 {where}, 30 of them lost: r")
    assert finding["detail"].endswith(", for instance, lacks its entry in Redis")
    assert "a worker restores them" in finding["advice"]
    real_broker.restore()
    assert found(quire, "open requests")[1][0]["verdict"] == "ok"


def test_status_names_requests_without_an_entry(quire, real_broker, real_connection):
    real_broker.submit_many([make_request(id=f"r{number}") for number in range(3)])
    assert "lost" not in quire("status")[1]
    trim(real_connection, real_broker)
    assert "\nat least 3 queued requests are lost" in quire("status")[1]
    (state,) = records(quire("status", "--json")[1])
    assert state["num_lost"] == 3
    real_broker.restore()


def test_every_kind_of_loss_is_found_and_nothing_else(real_broker, real_connection):
    keys = real_broker.keys
    later = real_broker.now_ms() + 60_000
    real_broker.submit_many([make_request(id=name) for name in ("runs", "gone", "waits")])
    claim_next(real_broker)
    real_broker.submit(make_request(id="later", not_before_ms=later))
    real_broker.submit(make_request(id="there"))
    real_broker.peek(count=1, block_seconds=0)
    assert inspect_losses(real_connection, keys).lost == {}
    real_connection.zrem(keys.rank(1), "gone", "waits")
    real_connection.delete(keys.lease, keys.delay, *keys.of_request("gone"))
    losses = inspect_losses(real_connection, keys)
    assert losses.lost == {
        "runs": Lost.LEASE, "gone": Lost.RECORD, "waits": Lost.ENTRY, "later": Lost.DELAY,
    }  # fmt: skip
    assert (losses.num_open, losses.num_seen) == (5, 5)
    real_broker.restore()


def test_what_is_claimed_between_two_reads_is_not_called_lost(
    real_broker, real_connection, monkeypatch
):
    real_broker.submit(make_request(id="a"))
    execute, claims = redis.client.Pipeline.execute, []

    def claiming(pipeline, *arguments, **options):
        replies = execute(pipeline, *arguments, **options)
        if not claims:
            claims.append("now")
            claims[0] = claim_next(real_broker)
        return replies

    monkeypatch.setattr(redis.client.Pipeline, "execute", claiming)
    assert inspect_losses(real_connection, real_broker.keys).lost == {}
    assert len(claims) == 1


def test_of_very_many_a_part_is_looked_at(real_broker, real_connection):
    real_broker.submit_many([make_request() for _ in range(1500)])
    losses = inspect_losses(real_connection, real_broker.keys, most=600)
    assert 600 <= losses.num_seen < losses.num_open == 1500


@pytest.mark.parametrize(
    ("told", "check", "verdict", "words"),
    [
        ({"used_memory": 79}, "redis memory", "ok", ""),
        ({"used_memory": 80}, "redis memory", "warn", "80% of maxmemory"),
        ({"used_memory": 98}, "redis memory", "warn", "98% of maxmemory"),
        ({"used_memory": 100}, "redis memory", "fail", "full"),
        # A replica's buffer is not counted by Redis.
        ({"used_memory": 100, "mem_not_counted_for_evict": 30}, "redis memory", "ok", ""),
        ({"maxmemory_policy": "allkeys-lru"}, "redis memory", "fail", "allkeys-lru"),
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": 0}, "redis memory", "warn", "volatile"),
        ({"maxmemory": 0, "total_system_memory": 1000}, "redis memory", "ok", "unlimited"),
        ({"maxmemory": 0, "total_system_memory": 12}, "redis memory", "warn", "83% of the machine"),
        ({"evicted_keys": 7}, "redis evictions", "warn", "7 keys"),
        ({"connected_clients": 8, "maxclients": 10}, "redis clients", "warn", "8 of 10"),
    ],
)
def test_doctor_warns_before_a_server_is_full(quire, monkeypatch, told, check, verdict, words):
    info = redis.Redis.info
    calm = {
        "used_memory": 10, "maxmemory": 100, "maxmemory_policy": "noeviction", "evicted_keys": 0,
        "mem_not_counted_for_evict": 0,
    }  # fmt: skip
    monkeypatch.setattr(
        redis.Redis, "info", lambda one, *sections: info(one, *sections) | calm | told
    )
    code, (finding,) = found(quire, check)
    assert (finding["verdict"], code) == (verdict, int(verdict == "fail"))
    assert words in finding["detail"]
    assert bool(finding["advice"]) == (verdict != "ok")


def test_doctor_has_nothing_to_say_of_a_server_that_evicted_nothing(quire):
    assert found(quire, "redis evictions") == (0, [])
    assert found(quire, "redis clients") == (0, [])
