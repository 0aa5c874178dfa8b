"""Finding what is due next: order, waiting, tickets, and what crashes and amnesia leave behind."""

import threading
import time

import pytest

from quire.queue.claim.claim import NotClaimedReason
from quire.wire.protocol import Priority
from tests.quire.builders import claim_next, make_item, make_request, read_and_claim
from tests.quire.waiting import PATIENCE_SECONDS, eventually


def read_ids(broker, *, count=10, block_seconds=0.0):
    return [one.request_id for one in broker.peek(count=count, block_seconds=block_seconds)]


def entries_left(connection, broker):
    return sum(connection.xlen(stream) for stream in broker.keys.all_ingress)


def test_the_most_urgent_are_read_first_and_no_more_than_asked_for(broker):
    broker.submit_many(
        [make_request(id=f"{name}{n}", priority=name) for n in "12" for name in
         ("low", "normal", "high", "critical")]
    )  # fmt: skip
    assert read_ids(broker, count=3) == ["critical1", "critical2", "high1"]
    broker.claim(broker.peek(count=3))
    assert read_ids(broker, count=10) == ["high2", "normal1", "normal2", "low1", "low2"]


def test_a_candidate_names_its_class_and_its_rank(broker):
    broker.submit_many([make_request(id="a", priority="high"), make_request(id="b")])
    first, second = broker.peek(count=2)
    assert (first.request_id, first.priority) == ("a", Priority.HIGH)
    assert (second.request_id, second.priority) == ("b", Priority.NORMAL)
    assert first.rank < second.rank


def test_a_look_takes_nothing(broker):
    broker.submit(make_request(id="a"))
    assert read_ids(broker) == read_ids(broker) == ["a"]


def test_a_worker_with_room_for_better_classes_only_finds_no_other(broker):
    broker.submit_many([make_request(id=level, priority=level) for level in
        ("low", "normal", "high", "critical")])  # fmt: skip
    found = [[one.request_id for one in broker.peek(count=10, least=level)]
        for level in reversed(Priority)]  # fmt: skip
    assert found == [["critical"], ["critical", "high"], ["critical", "high", "normal"],
        ["critical", "high", "normal", "low"]]  # fmt: skip


def read_until(broker, is_there, *, block_seconds):
    """What a waiting reader finds; it reads again if nothing had been there when it was over."""
    while not (found := read_ids(broker, block_seconds=block_seconds)) and not is_there.is_set():
        pass
    return found


@pytest.mark.parametrize("priority", list(Priority))
def test_a_waiting_reader_wakes_for_every_class(broker, priority):
    woken, is_there = list[str](), threading.Event()
    reader = threading.Thread(
        target=lambda: woken.extend(read_until(broker, is_there, block_seconds=2.0)), daemon=True
    )
    reader.start()
    broker.submit(make_request(id="a", priority=priority))
    is_there.set()
    reader.join(PATIENCE_SECONDS)
    # On a slow machine the request may have come before the reader: it is read all the same.
    assert woken == ["a"]


def test_a_reader_without_work_waits_and_does_not_spin(broker):
    began = time.monotonic()
    assert read_ids(broker, block_seconds=0.2) == []
    assert time.monotonic() - began >= 0.15


def test_every_waiting_reader_wakes_and_one_of_them_gets_the_request(broker):
    found, is_there = list[list[str]](), threading.Event()
    readers = [
        threading.Thread(
            target=lambda: found.append(read_until(broker, is_there, block_seconds=5.0))
        )
        for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    broker.submit(make_request(id="a"))
    is_there.set()
    for reader in readers:
        reader.join(PATIENCE_SECONDS)
    assert found == [["a"], ["a"]]


def test_a_reader_waits_for_what_comes_after_entries_that_are_left(broker, connection):
    """Entries that nobody can use up, as those that a stranger has read, wake nobody."""
    stream = broker.keys.ingress(Priority.NORMAL)
    connection.xadd(stream, {"id": "gone"})
    connection.xreadgroup("workers", "stranger", {stream: ">"}, count=1)
    began = time.monotonic()
    assert read_ids(broker, block_seconds=0.2) == []
    assert time.monotonic() - began >= 0.15
    assert connection.xlen(stream) == 1


def test_streams_that_the_server_forgot_are_no_error(broker, connection):
    connection.delete(*broker.keys.all_ingress)
    assert read_ids(broker) == []
    assert read_ids(broker, block_seconds=0.05) == []
    assert broker.balance() == 0
    broker.submit(make_request(id="a"))
    assert claim_next(broker).claim.request_id == "a"


def test_requests_submitted_before_the_first_worker_are_found_by_it(broker, connection):
    connection.delete(*broker.keys.all_ingress)
    broker.submit(make_request(id="early"))
    broker.ensure_groups()
    assert claim_next(broker).claim.request_id == "early"
    assert entries_left(connection, broker) == 0


def test_two_workers_that_find_the_same_request_do_not_both_get_it(broker):
    broker.submit(make_request(id="a"))
    one, other = broker.peek(count=1), broker.peek(count=1)
    (winner,), (loser,) = broker.claim(one), broker.claim(other)
    assert winner.claim.request_id == "a"
    assert loser.reason is NotClaimedReason.RUNNING


def test_a_member_of_a_rank_set_that_is_no_id_is_removed(broker, connection):
    connection.zadd(broker.keys.rank(1), {b"\xff": 1})
    broker.submit(make_request(id="a"))
    assert read_ids(broker) == ["a"]
    assert connection.zcard(broker.keys.rank(1)) == 1


def test_what_is_ranked_and_does_not_wait_leaves_the_rank_sets_with_its_claim(broker, connection):
    connection.zadd(broker.keys.rank(3), {"nothing": 1})
    assert read_and_claim(broker).reason is NotClaimedReason.MISSING
    assert read_ids(broker) == []


def test_at_rest_nothing_is_queued_pending_or_leased(broker, connection):
    broker.submit_many([make_request(priority=priority) for priority in Priority])
    for _ in Priority:
        broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
    assert sum(broker.queue_depth().values()) == 0
    assert connection.zcard(broker.keys.lease) == 0
    for stream in broker.keys.all_ingress:
        (group,) = connection.xinfo_groups(stream)
        assert (group["pending"], group.get("lag", 0)) == (0, 0)


def lag(connection, stream):
    """Undelivered entries by the group, where the server tells, and by the length of the stream."""
    (group,) = connection.xinfo_groups(stream)
    return group.get("lag", connection.xlen(stream)), connection.xlen(stream)


def test_the_lag_is_the_number_of_waiting_requests(broker, connection):
    stream = broker.keys.ingress(Priority.NORMAL)
    broker.submit_many([make_request(id=name) for name in "abcdefgh"])
    assert lag(connection, stream) == (8, 8)
    claim_next(broker)
    assert lag(connection, stream) == (7, 7)
    # The claim of another one than the oldest.
    broker.claim([broker.peek(count=9)[-1]])
    assert lag(connection, stream) == (6, 6)
    for name in "bcd":
        broker.cancel(name)
    assert lag(connection, stream) == (6, 6)
    # A claim uses up what is left over.
    claim_next(broker)
    assert lag(connection, stream) == (2, 2)
    broker.cancel("f")
    broker.cancel("g")
    assert lag(connection, stream) == (2, 2)
    # So does a worker that waits.
    eventually(
        lambda: read_ids(broker, block_seconds=0.05) == [] and lag(connection, stream) == (0, 0)
    )


def test_a_claim_uses_up_a_bounded_number_of_tickets(broker, connection):
    broker.submit_many([make_request(id=str(n)) for n in range(20)])
    for n in range(19):
        broker.cancel(str(n))
    claim_next(broker)
    assert connection.xlen(broker.keys.ingress(Priority.NORMAL)) == 20 - 1 - 4


def test_expired_requests_leave_no_lag_behind(broker, connection, clockwork):
    broker.submit_many([make_request(id=name) for name in "abc"])
    for name in "abc":
        clockwork.expire_queue_time(name)
    assert len(broker.expire()) == 3
    broker.balance()
    assert lag(connection, broker.keys.ingress(Priority.NORMAL)) == (0, 0)


def test_a_repeated_claim_uses_up_one_ticket(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    first = broker.peek(count=1)
    for _ in range(3):
        (claimed,) = broker.claim(first, owners=["ab"])
        assert claimed.claim.owner == "ab"
    assert connection.xlen(broker.keys.ingress(Priority.NORMAL)) == 2


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


def test_a_worker_silent_for_a_day_is_forgotten(broker, connection):
    for name in ("silent", "garbled"):
        broker.beat_worker(name, "ready", {})
    connection.hset(broker.keys.workers, "silent", b"1000 ready \x80")
    connection.hset(broker.keys.workers, "garbled", b"nonsense")
    broker.beat_worker("alive", "ready", {})
    assert connection.hkeys(broker.keys.workers) == [b"alive"]


def test_a_worker_that_comes_after_days_without_any_forgets_the_wishes_for_those_that_are_gone(
    broker, connection, monkeypatch
):
    """The registry goes when its workers would be forgotten."""
    monkeypatch.setattr("quire.queue.workers.beats.WORKER_MEMORY_SECONDS", 0.05)
    broker.beat_worker("gone", "ready", {})
    connection.hset(broker.keys.control, "drain:gone", 1000)
    eventually(lambda: not connection.exists(broker.keys.workers))
    broker.beat_worker("new", "ready", {})
    assert broker.control().drain_wishes == frozenset()


def test_a_worker_that_comes_new_leaves_a_wish_that_is_not_old(broker):
    """The worker that it is for may not have signed yet."""
    broker.drain("quiet")
    broker.beat_worker("new", "ready", {})
    assert broker.control().drain_wishes == {"quiet"}
