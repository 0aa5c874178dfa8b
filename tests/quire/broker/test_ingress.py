"""Reading the ingress: priorities, waiting, and what crashes and amnesia leave behind."""

import threading
import time
from functools import partial

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.broker.ingress import AGING_PERIOD, IngressReader
from quire.errors import BrokerUnavailable
from quire.transitions.values import NotClaimedReason
from quire.transport.connection import Retrying
from quire.wire.protocol import Priority
from tests.quire.builders import claim_next, make_item, make_request, read_and_claim


def read_ids(broker, *, count=10, worker="w", block_seconds=0.0):
    entries = broker.read_ingress(worker, count=count, block_seconds=block_seconds)
    return [entry.request_id for entry in entries]


def test_the_most_urgent_are_read_first_and_no_more_than_asked_for(broker):
    broker.submit_many(
        [make_request(id=f"{name}{n}", priority=name) for n in "12" for name in
         ("low", "normal", "high", "critical")]
    )  # fmt: skip
    assert read_ids(broker, count=3) == ["critical1", "critical2", "high1"]
    assert read_ids(broker, count=10) == ["high2", "normal1", "normal2", "low1", "low2"]


def test_an_entry_names_its_stream_its_class_and_its_time(broker):
    broker.submit(make_request(id="a", priority="high"))
    (entry,) = broker.read_ingress("w", count=1, block_seconds=0)
    assert (entry.request_id, entry.priority) == ("a", Priority.HIGH)
    assert entry.stream == broker.keys.ingress(Priority.HIGH)
    assert abs(entry.enqueued_ms - broker.now_ms()) < 60_000


def test_the_lowest_class_is_not_starved_by_a_steady_flow_of_better_ones(broker):
    broker.submit(make_request(id="patient", priority="low"))
    seen = []
    for _ in range(AGING_PERIOD):
        broker.submit(make_request(priority="critical"))
        seen += read_ids(broker, count=1)
    assert "patient" in seen


def test_between_a_flood_of_the_best_and_a_backlog_of_the_worst_the_middle_is_served(broker):
    for priority in ("low", "normal"):
        broker.submit_many([make_request(priority=priority) for _ in range(4)])
    served = []
    for _ in range(4 * AGING_PERIOD):
        broker.submit(make_request(priority="high"))
        served += broker.read_ingress("w", count=1, block_seconds=0)
    classes = [entry.priority for entry in served]
    assert classes.count(Priority.LOW) >= 1
    assert classes.count(Priority.NORMAL) >= 1


def test_who_has_room_for_better_classes_only_reads_no_other(broker):
    broker.submit_many([make_request(id=level, priority=level) for level in
        ("low", "normal", "high", "critical")])  # fmt: skip
    read = partial(broker.read_ingress, "w", count=10, block_seconds=0.01)
    ids = [[entry.request_id for entry in read(least=level)] for level in reversed(Priority)]
    assert ids == [["critical"], ["high"], ["normal"], ["low"]]
    recover = partial(broker.recover_entries, "other", min_idle_seconds=0, count=10)
    ids = [[entry.request_id for entry in recover(least=level)] for level in reversed(Priority)]
    assert ids == [["critical"], ["critical", "high"], ["critical", "high", "normal"],
        ["critical", "high", "normal", "low"]]  # fmt: skip


def test_reads_of_better_classes_only_take_no_turn_from_the_others(broker):
    """Each class is first in turn in reads of its own, even if every other one is without it."""
    broker.submit(make_request(id="patient", priority="low"))
    seen = []
    for _ in range(AGING_PERIOD):
        broker.submit_many([make_request(priority="critical") for _ in range(2)])
        seen += read_ids(broker, count=1)
        broker.read_ingress("w", count=1, block_seconds=0, least=Priority.CRITICAL)
    assert "patient" in seen


def test_among_the_better_classes_the_middle_is_served_too(broker):
    broker.submit_many([make_request(id=level, priority=level) for level in ("normal", "high")])
    seen = []
    for _ in range(2 * AGING_PERIOD):
        broker.submit(make_request(priority="critical"))
        entries = broker.read_ingress("w", count=1, block_seconds=0, least=Priority.HIGH)
        seen += [entry.request_id for entry in entries]
    assert ("high" in seen, "normal" in seen) == (True, False)


@pytest.mark.parametrize("priority", list(Priority))
def test_a_waiting_reader_wakes_for_every_class(broker, priority):
    woken: list[str] = []
    reader = threading.Thread(
        target=lambda: woken.extend(read_ids(broker, block_seconds=2.0)), daemon=True
    )
    reader.start()
    broker.submit(make_request(id="a", priority=priority))
    reader.join(10)
    # On a slow machine the request may have come before the reader: it is read all the same.
    assert woken == ["a"]


def test_a_reader_without_work_waits_and_does_not_spin(broker):
    began = time.monotonic()
    assert read_ids(broker, block_seconds=0.2) == []
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("last", ["xreadgroup", "xadd", "delete"])
def test_a_probe_that_broke_off_leaves_nothing_for_ever(broker, connection, monkeypatch, last):
    probes = f"{broker.keys.probe}:*"

    def die(*_args, **_options):
        if list(connection.scan_iter(probes)):
            raise RedisConnectionError("gone")

    monkeypatch.setattr(connection, last, die)
    monkeypatch.setattr(connection, "delete", die)
    reader = IngressReader(connection, broker.keys, retrying=Retrying(0.0))
    with pytest.raises(BrokerUnavailable):
        reader.read("w", count=1, block_seconds=0.01)
    left = list(connection.scan_iter(probes))
    assert len(left) == 1 and all(0 < connection.pttl(key) <= 60_000 for key in left)
    monkeypatch.undo()


def test_a_group_that_the_server_forgot_is_made_again(broker, connection):
    connection.delete(*broker.keys.all_ingress)
    assert read_ids(broker) == []
    connection.delete(*broker.keys.all_ingress)
    assert read_ids(broker, block_seconds=0.05) == []
    connection.delete(*broker.keys.all_ingress)
    assert broker.recover_entries("w", min_idle_seconds=0, count=10) == []
    broker.submit(make_request(id="a"))
    assert read_ids(broker) == ["a"]


def test_requests_submitted_before_the_first_worker_are_delivered_to_it(broker, connection):
    connection.delete(*broker.keys.all_ingress)
    broker.submit(make_request(id="early"))
    broker.ensure_groups()
    assert read_ids(broker) == ["early"]


def test_creating_the_groups_again_delivers_nothing_again(broker):
    broker.submit(make_request(id="a"))
    assert read_ids(broker) == ["a"]
    broker.ensure_groups()
    assert read_ids(broker) == []


def test_a_worker_that_died_between_read_and_claim_finds_its_entries_at_its_start(broker):
    broker.submit_many([make_request(id="a"), make_request(id="b", priority="critical")])
    assert read_ids(broker) == ["b", "a"]
    found = broker.recover_entries("w", min_idle_seconds=3600, count=10)
    assert [entry.request_id for entry in found] == ["b", "a"]
    assert [answer.claim.request_id for answer in broker.claim(found)] == ["b", "a"]
    assert broker.recover_entries("w", min_idle_seconds=0, count=10) == []


def test_entries_of_a_worker_that_never_came_back_go_to_another_one(broker):
    broker.submit(make_request(id="a"))
    assert read_ids(broker, worker="dead") == ["a"]
    assert broker.recover_entries("other", min_idle_seconds=3600, count=10) == []
    (entry,) = broker.recover_entries("other", min_idle_seconds=0, count=10)
    assert broker.claim([entry])[0].claim.request_id == "a"


def test_stealing_an_entry_from_a_live_worker_gives_the_request_to_one_of_them(broker):
    broker.submit(make_request(id="a"))
    entries = broker.read_ingress("slow", count=1, block_seconds=0)
    stolen = broker.recover_entries("eager", min_idle_seconds=0, count=10)
    (winner,) = broker.claim(stolen)
    (loser,) = broker.claim(entries)
    assert winner.claim.request_id == "a"
    assert loser.reason is NotClaimedReason.RUNNING


def test_a_pending_entry_that_was_deleted_is_cleared_away(broker, connection):
    broker.submit(make_request(id="a"))
    (entry,) = broker.read_ingress("w", count=1, block_seconds=0)
    connection.xdel(entry.stream, entry.entry_id)
    assert broker.recover_entries("w", min_idle_seconds=0, count=10) == []
    assert connection.xpending(entry.stream, "workers")["pending"] == 0


def test_at_rest_nothing_is_queued_pending_or_leased(broker, connection):
    broker.submit_many([make_request(priority=priority) for priority in Priority])
    for _ in Priority:
        broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
    assert sum(broker.queue_depth().values()) == 0
    assert connection.zcard(broker.keys.lease) == 0
    for stream in broker.keys.all_ingress:
        (group,) = connection.xinfo_groups(stream)
        assert (group["pending"], group.get("lag", 0)) == (0, 0)


def test_cancelling_in_the_queue_leaves_the_lag_known(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    broker.cancel("b")
    (group,) = connection.xinfo_groups(broker.keys.ingress(Priority.NORMAL))
    assert group.get("lag", 3) == 3
    for _ in range(3):
        read_and_claim(broker)
    (group,) = connection.xinfo_groups(broker.keys.ingress(Priority.NORMAL))
    assert group.get("lag", 0) == 0


def test_the_depth_of_the_queue_is_told_by_class(broker):
    broker.submit_many([make_request(priority="high"), make_request(), make_request()])
    depth = broker.queue_depth()
    assert depth == {Priority.LOW: 0, Priority.NORMAL: 2, Priority.HIGH: 1, Priority.CRITICAL: 0}


def test_workers_are_listed_with_their_last_word(broker):
    broker.beat_worker("b", "draining", {"running": 3})
    broker.beat_worker("a", "serving", {"running": 1, "waiting": 0.5})
    broker.beat_worker("b", "stopped", {})
    first, second = broker.workers()
    assert (first.name, first.state, first.load) == ("a", "serving", {"running": 1, "waiting": 0.5})
    assert (second.name, second.state) == ("b", "stopped")
    assert 0 <= first.seen_seconds < 60


def test_a_worker_silent_for_a_day_is_forgotten_but_not_what_is_pending_for_it(broker, connection):
    broker.submit(make_request(id="a"))
    assert read_ids(broker, worker="busy") == ["a"]
    assert read_ids(broker, worker="idle") == []
    for name in ("busy", "idle"):
        broker.beat_worker(name, "serving", {})
        connection.hset(broker.keys.workers, name, b"1000 serving \x80")
    broker.beat_worker("alive", "serving", {})
    assert [info.name for info in broker.workers()] == ["alive", "busy"]
    stream = broker.keys.ingress(Priority.NORMAL)
    assert [info["name"] for info in connection.xinfo_consumers(stream, "workers")] == [b"busy"]
    assert len(broker.recover_entries("alive", min_idle_seconds=0, count=1)) == 1


def test_a_worker_that_comes_after_days_without_any_forgets_whose_names_are_gone(
    broker, connection, monkeypatch
):
    """The registry goes when its workers would be forgotten, and their consumers stay."""
    monkeypatch.setattr("quire.broker.working.WORKER_MEMORY_SECONDS", 0.05)
    broker.submit_many([make_request(id=name) for name in "ab"])
    claim_next(broker, worker="gone")
    assert read_ids(broker, worker="busy") == ["b"]
    for name in ("busy", "gone"):
        broker.beat_worker(name, "ready", {})
        connection.hset(broker.keys.control, f"drain:{name}", 1000)
    give_up = time.monotonic() + 10
    while connection.exists(broker.keys.workers):
        assert time.monotonic() < give_up
    broker.beat_worker("new", "ready", {})
    stream = broker.keys.ingress(Priority.NORMAL)
    assert [info["name"] for info in connection.xinfo_consumers(stream, "workers")] == [b"busy"]
    assert broker.drain_wishes() == frozenset()
    assert len(broker.recover_entries("new", min_idle_seconds=0, count=1)) == 1


def test_a_worker_that_comes_new_leaves_who_is_not_silent_for_long(broker, connection):
    """Who reads may not have signed yet."""
    broker.submit(make_request())
    claim_next(broker, worker="quiet")
    broker.drain("quiet")
    broker.beat_worker("new", "ready", {})
    stream = broker.keys.ingress(Priority.NORMAL)
    assert [info["name"] for info in connection.xinfo_consumers(stream, "workers")] == [b"quiet"]
    assert broker.drain_wishes() == {"quiet"}
