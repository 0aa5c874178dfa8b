"""What the shards of a queue are together: what the command, the console and the exporter print."""

import pytest

from quire.queue.control.limits import QueueLimits
from quire.queue.rank.fairness import Fairness
from quire.queue.view.inspection import IngressState, ShardState
from quire.queue.view.view import Part, QueueView, view_queues
from quire.queue.workers.workers import GONE_SECONDS, SILENT_SECONDS, WorkerInfo
from quire.wire.output import Activity
from quire.wire.protocol import Priority
from tests.quire.builders import make_request


def shard(*workers: WorkerInfo, oldest: float = 0.0, leases: int = 0, expired: int = 0):
    ingress = tuple(IngressState(level, 1, oldest, 2) for level in Priority)
    return ShardState(ingress, False, 8, 0, 0, leases, expired, 0, workers)


def worker(name: str, seen: float, state: str = "ready", **load: float) -> WorkerInfo:
    return WorkerInfo(name, state, seen, load)


@pytest.mark.parametrize(
    ("state", "seen", "shown", "is_alive", "is_gone"),
    [
        ("ready", SILENT_SECONDS, "ready", True, False),
        ("ready", SILENT_SECONDS + 1, "silent", False, False),
        ("draining", GONE_SECONDS + 1, "silent", False, True),
        ("failed", 1.0, "failed", False, False),
        ("stopped", SILENT_SECONDS + 1, "stopped", False, False),
    ],
)
def test_a_worker_is_judged_by_its_last_word_and_its_age(state, seen, shown, is_alive, is_gone):
    info = worker("w", seen, state)
    assert (info.shown_state, info.is_alive, info.is_gone) == (shown, is_alive, is_gone)


def test_of_a_worker_of_several_shards_the_newest_word_counts():
    old = worker("w", 90.0, "loading", claims=9.0, decoding=2.0, kv_usage=0.1)
    new = worker("w", 1.0, claims=3.0, decoding=1.0, kv_usage=1.5, generated=7.0)
    view = QueueView("q", [shard(old, worker("gone", 900.0)), shard(new, worker("late", 61.0))])
    late, known = view.workers
    assert (late.name, late.shown_state, late.can_drain) == ("late", "silent", False)
    assert (known.name, known.shown_state, known.num_claims, known.generated) == (
        "w",
        "ready",
        3,
        7,
    )
    assert (known.activities[Activity.DECODING], known.kv_usage) == (3, 1.0)
    assert (view.num_alive, view.num_gone) == (1, 1)
    # By what any shard has seen: the exporter has a limit of its own.
    assert (view.num_ready(within=0.5), view.num_ready(within=60.0)) == (0, 1)
    assert view.num_ready(within=1000.0) == 3
    # Of the dead ones nothing counts.
    assert view.activities[Activity.DECODING] == 1


def test_counts_are_added_up_and_the_longest_wait_counts():
    view = QueueView("q", [shard(oldest=3.0, leases=1, expired=2), shard(oldest=5.0, leases=4)])
    assert [(c.priority, c.num_queued, c.undelivered_seconds) for c in view.classes] == [
        (level, 4, 5.0) for level in Priority
    ]
    assert (view.total("num_queued"), view.oldest_seconds) == (16, 5.0)
    assert view.rest("num_leases", "num_expired_leases") == 3
    assert view.rest("num_expired_leases", "num_leases") == 0


def test_every_part_of_two_shards_is_read_and_put_together(make_broker, connection):
    brokers = [make_broker(shard=number) for number in range(2)]
    for number, broker in enumerate(brokers):
        broker.set_limits(QueueLimits(tenants={"own": 0}, rate=600))
        broker.submit_many([make_request(tenant=name) for name in "aab"[number:]])
    now_ms = brokers[0].now_ms()
    held_until = {"free": now_ms - 1000, "held": now_ms + 600_000}
    connection.zadd(brokers[0].keys.batch_work, held_until)
    keys = [broker.keys for broker in brokers]

    def look() -> QueueView:
        (view,) = view_queues(connection, {"q": keys}, *Part)
        return view

    view = look()
    assert [(one.tenant, one.num_open) for one in view.busiest_tenants] == [("a", 3), ("b", 2)]
    assert view.busiest_tenants[0].tokens_per_minute == 1200
    assert [*view.num_open.items()] == [("own", 0), ("a", 3), ("b", 2)]
    assert (view.shared.num_tenants, view.shared.by_tokens) == (4, False)
    assert view.batches == [(2, 1), (0, 0)]
    assert (view.total("num_queued"), view.waiting_tokens > 0) == (5, True)
    assert (view.is_paused, view.pause_reason, view.do_settings_differ) == (False, "", False)

    # Batches have no expiry, and the fixture looks for keys that are left.
    connection.delete(brokers[0].keys.batch_work)
    brokers[0].pause()
    brokers[1].pause("repair")
    brokers[1].set_fairness(Fairness(by_tokens=True))
    view = look()
    assert (view.is_paused, view.pause_reason, view.do_settings_differ) == (True, "repair", True)
    assert (view.settings.fairness.by_tokens, view.shared.by_tokens) == (False, True)


def test_only_what_is_asked_for_is_read(broker, connection):
    connection.hset(broker.keys.control, "max_requests", "damaged")
    (view,) = view_queues(connection, {"q": [broker.keys]}, Part.SHARDS, Part.CONTROL)
    assert (len(view.shards), view.pause_reason, view.backlog) == (1, "", ())
