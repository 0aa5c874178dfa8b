"""Fairness between the tenants of a class: they take turns by the tokens of their requests."""

import random

import pytest

from quire.queue.control.limits import QueueLimits
from quire.queue.lease.lease import BackOff
from quire.queue.rank.fairness import Fairness
from quire.queue.rank.policy import QueuePolicy
from quire.wire.output import ErrorInfo
from tests.quire.builders import Snapshot, claim_next, make_item, make_request
from tests.quire.queue.repair.test_restore import restore
from tests.quire.servers import on_the_real_server

SHARED = Fairness(by_tokens=True)


def sized(tokens, **fields):
    """A request of so many tokens: three of its prompt, the others to generate."""
    return make_request(body={"prompt": [1, 2, 3], "max_tokens": tokens - 3}, **fields)


def submit(broker, tenant, count, *, tokens=100, first=0, **fields):
    """Requests of a tenant, named in the order of their submit."""
    names = [f"{tenant}{number:04}" for number in range(first, first + count)]
    broker.submit_many([sized(tokens, id=name, tenant=tenant, **fields) for name in names])
    return names


def order(broker):
    return [candidate.request_id for candidate in broker.peek(count=20_000)]


def claimed(broker, count):
    return [claim_next(broker).claim.request_id for _ in range(count)]


def tenants(names):
    return "".join(name[0] for name in names)


@pytest.fixture
def shared(broker):
    broker.set_fairness(SHARED)
    return broker


def test_fairness_is_off_until_an_operator_sets_it_and_is_kept_in_redis(broker, make_broker):
    assert broker.control().fairness == Fairness()
    broker.pause("repairs")
    for fairness in (Fairness(by_tokens=True, weights={"a": 3}), Fairness(weights={"b": 2})):
        broker.set_fairness(fairness)
        assert make_broker().control().fairness == fairness
    broker.set_fairness(Fairness())
    assert broker.control().fairness == Fairness()
    assert broker.pause_reason() == "repairs"


@pytest.mark.parametrize("weight", [0, 1001, -1])
def test_a_weight_out_of_range_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        Fairness(weights={"a": weight})


def test_a_small_tenant_is_interleaved_with_the_thousand_requests_of_another(real_broker):
    real_broker.set_fairness(SHARED)
    submit(real_broker, "a", 1000)
    submit(real_broker, "b", 10)
    first = claimed(real_broker, 20)
    assert tenants(first) == "ab" * 10
    assert first[::2] == [f"a{n:04}" for n in range(10)]
    assert first[1::2] == [f"b{n:04}" for n in range(10)]


def test_without_fairness_it_waits_for_all_of_them(real_broker):
    submit(real_broker, "a", 1000)
    submit(real_broker, "b", 10)
    assert tenants(order(real_broker)) == "a" * 1000 + "b" * 10


def test_turns_are_by_tokens_and_not_by_requests(shared):
    submit(shared, "a", 40, tokens=100)
    submit(shared, "b", 10, tokens=400)
    served = order(shared)[:25]
    assert tenants(served).count("a") == 20
    for number in range(5):
        assert tenants(served[5 * number : 5 * number + 5]).count("b") == 1


def test_a_tenant_gets_tokens_by_its_weight(broker):
    broker.set_fairness(Fairness(by_tokens=True, weights={"b": 3}))
    submit(broker, "a", 40)
    submit(broker, "b", 40)
    for number in range(10):
        assert tenants(order(broker)[4 * number : 4 * number + 4]).count("b") == 3


@on_the_real_server
def test_a_tenant_that_returns_is_lifted_to_the_least_active_one(shared):
    """It gets nothing for the time in which it was away, and loses nothing by earlier requests."""
    submit(shared, "b", 20)
    claimed(shared, 20)
    submit(shared, "a", 200)
    claimed(shared, 50)
    submit(shared, "b", 10, first=20)
    submit(shared, "c", 10)
    served = claimed(shared, 30)
    for number in range(10):
        assert sorted(tenants(served[3 * number : 3 * number + 3])) == ["a", "b", "c"]


def test_many_tenants_that_come_one_by_one_keep_their_order(shared):
    submit(shared, "a", 50)
    draw = random.Random(3)
    names = [f"t{draw.randrange(10**6)}-{n}" for n in range(50)]
    for name in names:
        shared.submit(sized(100, id=name, tenant=name))
    served = [name for name in order(shared) if name in names]
    assert served == names


def test_requests_of_one_tenant_keep_their_order_whatever_is_given_back(shared):
    names = submit(shared, "a", 10)
    served = []
    for number in range(30):
        answer = claim_next(shared)
        served.append(answer.claim.request_id)
        shared.commit([make_item(answer.claim, 0, 1, final=True)])
        names += submit(shared, "a", 1, first=10 + number)
    assert served == names[:30]
    assert order(shared) == names[30:]


def test_a_class_is_shared_alone_and_a_better_one_comes_first(shared):
    submit(shared, "a", 10)
    submit(shared, "b", 5, priority="high")
    submit(shared, "c", 2)
    assert tenants(order(shared)) == "bbbbb" + "acac" + "a" * 8


def test_what_an_answer_leaves_unused_is_given_back(shared):
    """Both count 1000 for each request; those of b end after 10 tokens, those of a use all."""
    submit(shared, "a", 60, tokens=1000)
    served = []
    for number in range(30):
        submit(shared, "b", 1, tokens=1000, first=number)
        claim = claim_next(shared).claim
        served.append(claim.request_id)
        length = 7 if claim.request_id[0] == "b" else 997
        shared.commit([make_item(claim, 0, length, final=True)])
    assert tenants(served).count("b") >= 20


def test_without_what_is_given_back_it_would_get_half(make_broker):
    from quire.queue.scripts import load_source

    source = load_source("commit").replace(
        "    give_back(record, entry.tenant, tonumber(entry.tokens))\n", ""
    )
    broker = make_broker(sources={"commit": source})
    broker.set_fairness(SHARED)
    with pytest.raises(AssertionError):
        test_what_an_answer_leaves_unused_is_given_back(broker)


def test_what_is_cancelled_while_it_waits_counts_for_nothing(shared):
    submit(shared, "a", 50)
    for name in submit(shared, "b", 40):
        shared.cancel(name)
    submit(shared, "b", 10, first=40)
    assert tenants(order(shared)[:20]).count("b") == 10


@on_the_real_server
def test_one_tenant_alone_is_served_in_its_order_by_every_policy(broker):
    """No inversions: without another tenant, a moment is about the arrival."""
    broker.set_fairness(SHARED)
    for number, name in enumerate(("fcfs", "priority", "sjf", "adaptive")):
        broker.announce(QueuePolicy(name, 30_000, 1000))
        names = submit(broker, "a", 300, first=300 * number)
        assert order(broker) == names
        broker.cancel_many(names)


def test_a_class_of_a_tenant_that_is_lifted_comes_no_sooner_than_it_would(broker):
    """The moments of a class stay between the oldest arrival that waits and now."""
    broker.set_fairness(SHARED)
    broker.announce(QueuePolicy("fcfs", 1, 1))
    submit(broker, "a", 3, priority="low")
    submit(broker, "b", 3, priority="high")
    submit(broker, "c", 3, priority="low")
    served = tenants(order(broker))
    assert served.index("a") == 0
    assert served.rindex("b") < served.rindex("c")


def test_a_policy_orders_moments_as_it_orders_arrivals(broker):
    broker.set_fairness(SHARED)
    broker.announce(QueuePolicy("sjf", 86_400_000, 1000))
    submit(broker, "a", 20, tokens=500)
    submit(broker, "b", 1, tokens=900)
    submit(broker, "c", 1, tokens=100)
    assert tenants(order(broker)) == "c" + "a" * 20 + "b"


def test_what_comes_back_with_tokens_keeps_its_moment_and_what_has_none_takes_turns_anew(
    shared, clockwork
):
    submit(shared, "a", 20)
    submit(shared, "b", 20)
    with_tokens, without = claim_next(shared), claim_next(shared)
    shared.commit([make_item(with_tokens.claim, 0, 2)])
    for answer in (with_tokens, without):
        clockwork.expire_lease(answer.claim.request_id)
    shared.reap()
    again = order(shared)
    assert again[0] == with_tokens.claim.request_id
    assert again[-1] == without.claim.request_id
    # It is counted once, so the others of its tenant keep their turns.
    assert abs(tenants(again[:20]).count("a") - 10) <= 1


def test_an_attempt_that_is_made_again_is_counted_once(shared, connection, clockwork):
    submit(shared, "a", 1)
    for _ in range(3):
        answer = claim_next(shared)
        shared.fail(answer.claim, ErrorInfo("x", "y"), retry=BackOff())
        clockwork.expire_delay("a0000")
        shared.promote()
        submit(shared, "z", 1)
        shared.cancel("z0000")
    key = shared.keys.fair(1)
    finish = connection.zscore(key, "finish:a") - connection.zscore(key, "start:a")
    assert 0 < finish <= 100


def test_a_lost_virtual_time_loses_fairness_alone(shared, connection):
    names = submit(shared, "a", 20) + submit(shared, "b", 5)
    connection.delete(shared.keys.fair(1), shared.keys.arrival)
    names += submit(shared, "b", 5, first=5) + submit(shared, "a", 5, first=20)
    assert sorted(claimed(shared, 35)) == sorted(names)
    submit(shared, "a", 10, first=50)
    submit(shared, "b", 10, first=50)
    assert tenants(order(shared)[:10]).count("b") == 5


def test_a_lost_rank_set_is_restored_in_the_fair_order(shared, connection):
    submit(shared, "a", 20)
    submit(shared, "b", 5)
    before = order(shared)
    connection.delete(*shared.keys.all_ranks)
    restore(shared)
    assert order(shared) == before


def test_when_fairness_ends_the_order_is_that_of_arrival_again(shared):
    names = submit(shared, "a", 20) + submit(shared, "b", 5)
    assert order(shared) != names
    shared.set_fairness(Fairness())
    restore(shared)
    assert order(shared) == names
    shared.set_fairness(SHARED)
    restore(shared)
    assert tenants(order(shared)[:10]).count("b") == 5


def test_a_worker_learns_the_arrival_and_the_moment(shared):
    submit(shared, "a", 5)
    submit(shared, "b", 1)
    first, second = claim_next(shared), claim_next(shared)
    assert second.claim.request_id == "b0000"
    assert second.arrival_us > first.arrival_us
    assert second.ranked_us < second.arrival_us


@on_the_real_server
def test_only_tenants_that_are_ahead_take_memory(shared, connection):
    """A hundred thousand would be as many as have requests that wait."""
    submit(shared, "a", 300)
    for number in range(100):
        submit(shared, f"t{number}-", 1)
    key = shared.keys.fair(1)
    assert connection.zcard(key) > 200
    claimed(shared, 350)
    submit(shared, "z", 1)
    assert connection.zcount(key, "(0", "+inf") < 10
    assert connection.pttl(key) > 0


@on_the_real_server
def test_moments_are_few_however_long_the_queue_waits(shared, connection):
    """A day of waiting: each arrival is a second after the last one."""
    key = shared.keys.arrival
    submit(shared, "a", 1, tokens=10)
    for number in range(1, 1500):
        last = int(connection.hget(key, "last"))
        connection.hset(key, "last", last + 60_000_000)
        submit(shared, "a", 1, tokens=10, first=number)
    assert connection.zcount(shared.keys.fair(1), "-inf", "(0") < 1300
    submit(shared, "b", 20, tokens=10)
    assert tenants(order(shared)[:20]).count("b") >= 9


def test_every_stored_number_is_an_integer(shared, connection):
    weights = {"a": 3, "b": 7}
    shared.set_fairness(Fairness(by_tokens=True, weights=weights))
    for number in range(20):
        for tenant in weights:
            submit(shared, tenant, 1, tokens=101, first=number)
        claim = claim_next(shared).claim
        shared.commit([make_item(claim, 0, 33, final=True)])
    scores = connection.zrange(shared.keys.fair(1), 0, -1, withscores=True)
    assert scores and all(float(score).is_integer() for _, score in scores)
    assert all(abs(score) < 2**53 for _, score in scores)


def test_a_server_that_forgets_its_last_seconds_forgets_turns_and_requests_together(
    shared, connection
):
    shared.set_limits(QueueLimits(rate=100_000))
    before_claims = submit(shared, "a", 8)
    before = Snapshot(connection, shared)
    for _ in range(4):
        (reply,) = shared.commit([make_item(claim_next(shared).claim, 0, 1, final=True)])
        assert reply.status == "ok"
    submit(shared, "b", 3)
    before.restore()
    assert order(shared) == before_claims
    submit(shared, "b", 3)
    # Nothing was claimed in this past, so the tenant that returns begins beside the first one.
    assert tenants(claimed(shared, 6)) == "ababab"
