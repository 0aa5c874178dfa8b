"""Keys and scripts: one slot, all keys declared, one clock; and any Redis client can take part."""

import contextlib
import re
import time

import msgpack
import pytest
from redis.crc import key_slot

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.control.limits import QueueLimits
from quire.queue.lease.lease import BackOff
from quire.queue.rank.fairness import Fairness
from quire.queue.rank.policy import QueuePolicy
from quire.queue.scripts import TRANSITIONS, load_source
from quire.transport.connection import connect
from quire.transport.local_redis import URL_VARIABLE, LocalRedis, free_port
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import Priority
from tests.quire.builders import (
    Clockwork,
    leaked_keys,
    make_item,
    make_request,
    read_all,
    submit_and_claim,
)


def test_all_keys_of_a_shard_lie_in_one_slot():
    keys = Keys("a-queue", 3)
    names = [
        *keys.of_workers, *keys.of_scripts("r{2}"), *keys.of_group("g"),
        keys.idempotency("t", "k{3}"), keys.workers,
    ]  # fmt: skip
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert len(set(names)) == len(names)
    assert keys.lease == "quire:{a-queue.3}:lease"


@pytest.mark.parametrize("queue", ["", "a}b", "a{b", "a b", "x" * 65, "a\n"])
def test_a_queue_name_that_would_break_the_hash_tag_is_refused(queue):
    with pytest.raises(ValueError, match="queue name"):
        Keys(queue)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_no_script_makes_up_a_key_or_looks_at_another_clock(name):
    source = load_source(name)
    code = "\n".join(line.split("--")[0] for line in source.splitlines())
    assert "quire:" not in code, "a key that is not declared cannot be found in a cluster"
    assert not re.search(r"\bos\.|\bmath\.random|cmsgpack|cjson|struct\.", code)
    assert not re.search(r"redis\.call\('(KEYS|SCAN|INFO|CONFIG|EVAL|SELECT)'", code)


#: Put before a script: every key a command names must be among the declared ones.
_WATCH_KEYS = """
local declared, server = {}, redis
for _, key in ipairs(KEYS) do declared[key] = true end
local function keys_of(command, words)
  if command == 'XREAD' then -- COUNT <number> STREAMS, then keys, then as many ids
    return { unpack(words, 4, 3 + (#words - 3) / 2) }
  end
  if command == 'XREADGROUP' then -- of one stream, its key and the id at the end
    return { words[#words - 1] }
  end
  if command == 'EXISTS' then
    return words
  end
  return { words[(command == 'XGROUP' or command == 'XINFO') and 2 or 1] }
end
local function watched(send)
  return function(command, ...)
    for _, key in ipairs(command == 'TIME' and {} or keys_of(command, { ... })) do
      if not declared[key] then
        error('undeclared key ' .. tostring(key) .. ' in ' .. command)
      end
    end
    return send(command, ...)
  end
end
local redis = { call = watched(server.call), pcall = watched(server.pcall) }
"""


def go_through_everything(broker, clockwork):
    """A life of requests that takes every transition and most of their branches."""
    broker.submit_many([make_request(id=f"r{n}", metadata={"n": n}) for n in range(6)])
    for _ in range(2):
        broker.submit(make_request(id="key", idempotency_key="k"))
        broker.submit(make_request(idempotency_key="k"))
    broker.cancel("r5")
    answers = broker.claim(broker.peek(count=9, block_seconds=0))
    claims = [answer.claim for answer in answers if isinstance(answer, Claimed)]
    finished, released, reaped, buried, cancelled, _ = claims
    broker.cancel(cancelled.request_id)
    broker.commit([make_item(claim, 0, 2) for claim in claims])
    broker.commit([make_item(finished, 2, 3, final=True), make_item(released, 2, 3)])
    broker.heartbeat(claims)
    broker.release([released])
    for lost in (reaped, cancelled):
        clockwork.expire_lease(lost.request_id)
    broker.reap()
    broker.dead_letter(buried, "tired of it")
    broker.requeue(broker.dead_letters()[0], keep_tokens=True)
    go_through_delays(broker, clockwork)
    broker.announce(QueuePolicy("adaptive", 30_000, 4096))
    broker.balance()
    broker.beat_worker("w", "serving", {})
    clockwork.connection.hset(broker.keys.workers, "w", b"1000 serving \x80")
    broker.beat_worker("other", "serving", {})
    states = {claim.request_id: str(broker.status(claim.request_id).state) for claim in claims}
    assert states == {
        "r0": "completed", "r1": "queued", "r2": "queued", "r3": "queued", "r4": "cancelled",
        "key": "running",
    }  # fmt: skip
    assert (broker.discard("r0"), broker.discard("r1")) == ("completed", "queued")
    go_through_losses(broker, clockwork.connection)


def go_through_losses(broker, connection):
    broker.submit(make_request(id="lost", idempotency_key="lost"))
    broker.submit(make_request(id="g~gone"))
    keys = broker.keys
    connection.delete(*keys.of_request("g~gone"))
    connection.delete(keys.delay, keys.lease, keys.wait, *keys.all_ranks)
    for name in ("lost", "other"):
        broker.submit(make_request(id=name, idempotency_key="lost"))
        connection.delete(*keys.all_ranks)
    lost = {restored.request_id: restored.lost for restored in broker.restore()}
    assert lost == {
        "r1": "entry", "r2": "entry", "r3": "entry", "lost": "entry", "g~gone": "record",
        "g~2": "delay", "g~3": "delay", "key": "lease",
    }  # fmt: skip
    assert broker.restore(is_at_once=True) == []


def go_through_delays(broker, clockwork):
    soon = broker.now_ms() + 60_000
    later = [make_request(id=f"g~{n}", not_before_ms=soon, priority="critical") for n in range(5)]
    broker.submit_many(later)
    broker.cancel("g~0")
    clockwork.connection.delete(*broker.keys.of_request("g~1"))
    for name in ("g~1", "g~2", "g~3"):
        clockwork.expire_delay(name)
    broker.promote()
    clockwork.expire_queue_time("g~4")
    clockwork.connection.zadd(broker.keys.wait, {"nobody": 1})
    assert [expired.request_id for expired in broker.expire()] == ["g~4"]
    broker.pause("repairs")
    candidates, is_paused = broker._ingress.peek(count=1, least=Priority.LOW)
    assert is_paused
    assert [answer.reason for answer in broker.claim(candidates)] == ["paused"]
    broker.resume()
    answers = broker.claim(broker.peek(count=2, block_seconds=0))
    error = ErrorInfo("device_failed", "gone")
    states = [broker.fail(answer.claim, error, retry=BackOff()) for answer in answers]
    assert states == ["scheduled"] * 2
    go_through_damage(broker, clockwork.connection)


def go_through_damage(broker, connection):
    broker.submit(make_request(id="g~spoilt", priority="critical"))
    for key in broker.keys.of_request("g~spoilt"):
        connection.delete(key)
        connection.rpush(key, "foreign")
    entries = broker.peek(count=1, block_seconds=0)
    assert [answer.reason for answer in broker.claim(entries)] == ["damaged"]
    assert broker.status("g~spoilt").state is State.FAILED


def share_by_tokens(broker):
    broker.set_fairness(Fairness(by_tokens=True, weights={"default": 2}))
    broker.set_limits(QueueLimits(rate=1_000_000))


@pytest.mark.parametrize("is_shared", [False, True])
def test_every_script_declares_all_keys_it_touches(make_broker, clockwork, is_shared):
    sources = {name: _WATCH_KEYS + load_source(name) for name in TRANSITIONS}
    broker = make_broker(max_backlog=100, sources=sources)
    if is_shared:
        share_by_tokens(broker)
    go_through_everything(broker, clockwork)


def test_a_key_that_is_not_declared_would_be_noticed(make_broker):
    source = _WATCH_KEYS + load_source("submit").replace(
        "return { 'created'", "redis.call('GET', 'other') return { 'created'"
    )
    with pytest.raises(ProtocolError, match="undeclared key other"):
        make_broker(sources={"submit": source}).submit(make_request())


@pytest.mark.real_redis
@pytest.mark.timeout(60)
def test_a_server_in_cluster_mode_runs_every_script(monkeypatch):
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    # By itself the server takes the port 10,000 above its own for the bus, and there may be none.
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(LocalRedis.start(options=options))
        if not server.is_real:
            pytest.skip("no real Redis to start on this machine")
        connection = stack.enter_context(connect(server.url))
        connection.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        while connection.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            time.sleep(0.02)
        broker = Broker(connection, queue="cluster")
        broker.ensure_groups()
        share_by_tokens(broker)
        go_through_everything(broker, Clockwork(connection, broker))


def test_every_transition_of_the_protocol_has_its_script():
    assert [*TRANSITIONS] == [
        "announce", "balance", "beat_worker", "cancel", "claim", "commit", "condemn", "dead_letter",
        "discard", "expire", "extend", "fail", "heartbeat", "hold", "promote", "reap", "release",
        "requeue", "restore", "submit", "survey",
    ]  # fmt: skip


def test_another_language_can_submit_with_the_script_and_msgpack_alone(broker, connection):
    keys = broker.keys
    body = msgpack.packb(
        {
            "v": 1, "id": "foreign", "kind": "tokens", "body": {"prompt": [1, 2, 3]},
            "tenant": "default", "priority": 2, "created_ms": 0,
        }
    )  # fmt: skip
    settings = [10_000, 86_400_000, 3_600_000, 5, 0, b"", b"", b"", b""]
    reply = connection.eval(
        load_source("submit"), 26, *keys.of_producers, *keys.of_request("foreign"), *settings,
        "foreign", 2, "default", 0, b"", body, "", 0, 19,
    )  # fmt: skip
    assert reply == [b"created", b"foreign", b"queued"]
    (entry,) = broker.peek(count=1, block_seconds=0)
    (claimed,) = broker.claim([entry])
    assert claimed.request_bytes == body
    broker.commit([make_item(claimed.claim, 0, 2, final=True)])
    assert read_all(broker, "foreign")[1].state is State.COMPLETED


def test_another_language_can_follow_an_output_with_xread_and_msgpack_alone(broker, connection):
    claimed = submit_and_claim(broker, id="a", metadata={"row": 1})
    broker.commit([make_item(claimed.claim, 0, 3)])
    broker.commit([make_item(claimed.claim, 3, 4, final=True)])
    stream = broker.keys.output("a")
    tokens: list[int] = []
    done = None
    while done is None:
        after = f"{len(tokens)}-0"
        for _, entries in connection.xread({stream: after}, count=1):
            for entry_id, fields in entries:
                if b"done" in fields:
                    done = msgpack.unpackb(fields[b"done"])
                    assert int(entry_id.split(b"-")[0]) == len(tokens)
                    assert msgpack.unpackb(fields[b"metadata"]) == {"row": 1}
                else:
                    assert int(fields[b"from"]) == len(tokens)
                    tokens += msgpack.unpackb(fields[b"ids"])
    assert (len(tokens), done["state"], done["finish_reason"]) == (4, "completed", "length")


def test_what_a_request_leaves_behind_is_what_the_data_model_says(broker, connection):
    claimed = submit_and_claim(broker, id="a", metadata={"row": 1})
    record = connection.hgetall(broker.keys.request("a"))
    assert {name.decode() for name in record} == {
        "state", "priority", "tenant", "epoch", "attempts", "resumes", "published", "owner",
        "deadline_ms", "resumed_from", "worker", "submitted_ms", "claimed_ms", "metadata", "asked",
        "arrival", "answer", "answer_limit",
    }  # fmt: skip
    broker.commit([make_item(claimed.claim, 0, 1, final=True)])
    left = connection.hgetall(broker.keys.request("a"))
    assert set(left) - set(record) == {b"first_token_ms", b"finished_ms", b"prefix"}
    assert set(record) - set(left) == {b"metadata"}


def test_reading_the_log_does_not_depend_on_the_request_still_being_queued_elsewhere(broker):
    broker.submit(make_request(id="a"))
    assert broker.read_output({"a": 0}, block_seconds=0.01) == {}
    assert broker.read_output({}) == {}


def test_a_key_without_an_expiry_is_found_by_the_check_that_follows_every_test(broker, connection):
    submit_and_claim(broker, id="a")
    assert leaked_keys(connection, broker) == []
    connection.persist(broker.keys.request("a"))
    assert leaked_keys(connection, broker) == [broker.keys.request("a")]
    connection.expire(broker.keys.request("a"), 60)
