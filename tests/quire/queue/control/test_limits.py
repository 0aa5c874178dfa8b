"""Limits of a queue, and its pauses: kept in Redis, so that every client of any kind obeys them."""

import pytest

from quire.errors import QueueFull
from quire.queue.claim.claim import NotClaimed, NotClaimedReason
from quire.queue.control.limits import Backlog, QueueLimits
from quire.queue.lease.lease import BackOff
from quire.wire.output import ErrorInfo, State
from quire.wire.sizes import BYTES_PER_TOKEN, MAX_TOKENS_PER_REQUEST, estimated_tokens
from tests.quire.books import unbalanced
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_and_claim,
    submit_and_claim,
)


def sized(tokens, **changes):
    """A request that counts for so many tokens: three of its prompt, the others to generate."""
    return make_request(body={"prompt": [1, 2, 3], "max_tokens": tokens - 3}, **changes)


def refusal(broker, request):
    with pytest.raises(QueueFull) as caught:
        broker.submit(request)
    return caught.value.limit


def test_limits_are_kept_in_redis_and_replaced_as_a_whole(broker, make_broker):
    assert broker.control().limits == QueueLimits()
    broker.pause("repairs")
    for limits in (
        QueueLimits(requests=5, tokens=100, per_tenant=2, tenants={"a": 9, "b": 0}),
        QueueLimits(tokens=7),
        QueueLimits(),
    ):
        broker.set_limits(limits)
        assert make_broker().control().limits == limits
    assert broker.pause_reason() == "repairs"


@pytest.mark.parametrize(
    "limits", [{"requests": 0}, {"tokens": -1}, {"per_tenant": 0}, {"tenants": {"a": -1}}]
)
def test_a_limit_that_limits_nothing_or_everything_is_refused(limits):
    with pytest.raises(ValueError, match="limit"):
        QueueLimits(**limits)


def test_too_many_requests_are_refused_whatever_state_they_wait_in(broker):
    broker.set_limits(QueueLimits(requests=2))
    broker.submit_many([make_request(), make_request(not_before_ms=broker.now_ms() + 60_000)])
    assert refusal(broker, make_request()) == "requests"
    claim_next(broker)
    assert broker.submit(make_request()).created


def test_too_many_tokens_are_refused_and_those_that_run_no_longer_wait(broker):
    broker.set_limits(QueueLimits(tokens=100))
    broker.submit(sized(60, id="a"))
    assert refusal(broker, sized(41)) == "tokens"
    assert broker.submit(sized(40)).created
    assert refusal(broker, sized(4)) == "tokens"
    assert claim_next(broker).claim.request_id == "a"
    assert broker.backlog() == Backlog(40, {"default": 2})
    assert broker.submit(sized(60)).created


def test_a_request_above_the_limit_by_itself_is_let_in_where_no_tokens_wait(broker):
    """It would be told for ever to try again later."""
    broker.set_limits(QueueLimits(tokens=100))
    assert broker.submit(sized(500, id="a")).created
    assert refusal(broker, sized(4)) == "tokens"
    claim_next(broker)
    assert broker.submit(sized(40)).created
    assert refusal(broker, sized(500)) == "tokens"


def test_a_tenant_has_as_many_open_requests_as_it_may_and_others_do_not_mind(broker):
    broker.set_limits(QueueLimits(per_tenant=1, tenants={"big": 2, "free": 0}))
    claimed = submit_and_claim(broker, tenant="small", id="a")
    assert refusal(broker, make_request(tenant="small")) == "tenant"
    broker.commit([make_item(claimed.claim, 0, 1, final=True)])
    assert broker.submit(make_request(tenant="small")).created
    broker.submit_many([make_request(tenant="big") for _ in range(2)])
    assert refusal(broker, make_request(tenant="big")) == "tenant"
    broker.submit_many([make_request(tenant="free") for _ in range(9)])
    assert broker.backlog().tenants == {"small": 1, "big": 2, "free": 9}


def test_what_is_known_is_no_new_request_however_full_the_queue_is(broker):
    request = sized(60, idempotency_key="k")
    broker.submit(request)
    broker.set_limits(QueueLimits(requests=1, tokens=1, per_tenant=1))
    assert not broker.submit(request).created
    assert not broker.submit(sized(60, idempotency_key="k")).created
    assert broker.backlog() == Backlog(60, {"default": 1})


def test_every_way_back_into_the_queue_and_out_of_it_is_counted(broker, clockwork, connection):
    waiting = {"default": 1}
    broker.submit(sized(50, id="a"))
    claimed = claim_next(broker)
    assert broker.backlog() == Backlog(0, waiting)
    broker.release([claimed.claim])
    assert broker.backlog() == Backlog(50, waiting)
    claim_next(broker)
    clockwork.expire_lease("a")
    broker.reap()
    assert broker.backlog() == Backlog(50, waiting)
    claimed = claim_next(broker)
    broker.fail(claimed.claim, ErrorInfo("x", "y"), retry=BackOff())
    assert broker.backlog() == Backlog(50, waiting)
    clockwork.expire_delay("a")
    broker.promote()
    assert broker.backlog() == Backlog(50, waiting)
    claimed = claim_next(broker)
    broker.dead_letter(claimed.claim, "tired")
    assert broker.backlog() == Backlog(0, {})
    broker.requeue(broker.dead_letters()[0], keep_tokens=True)
    assert broker.backlog() == Backlog(50, waiting)
    broker.cancel("a")
    assert broker.backlog() == Backlog(0, {})
    assert connection.exists(broker.keys.open, broker.keys.counts) == 0


def test_a_request_that_was_forgotten_is_struck_out_by_whoever_meets_it(
    broker, connection, clockwork
):
    submit_and_claim(broker, id="running")
    broker.submit(sized(20, id="queued"))
    for name in ("queued", "running"):
        connection.delete(*broker.keys.of_request(name))
    assert broker.backlog() == Backlog(20, {"default": 2})
    assert read_and_claim(broker) == NotClaimed("queued", NotClaimedReason.MISSING)
    clockwork.expire_lease("running")
    broker.reap()
    assert broker.backlog() == Backlog(0, {})
    broker.submit(sized(30, id="again"))
    connection.delete(*broker.keys.of_request("again"))
    assert broker.submit(sized(40, id="again")).created
    assert broker.backlog() == Backlog(40, {"default": 1})


def test_books_that_were_tampered_with_would_be_noticed(broker, connection):
    broker.submit(sized(40, id="g~a"))
    assert unbalanced(connection, broker) == []
    connection.hincrby(broker.keys.counts, "tokens", 1)
    connection.hincrby(broker.keys.of_group("g")[0], "queued", 1)
    assert len(unbalanced(connection, broker)) == 2
    connection.hincrby(broker.keys.counts, "tokens", -1)
    connection.hincrby(broker.keys.of_group("g")[0], "queued", -1)
    connection.hset(broker.keys.request("g~a"), "state", "running")
    assert len(unbalanced(connection, broker)) == 2
    connection.hset(broker.keys.request("g~a"), "state", "queued")


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"kind": "tokens", "body": {"prompt": [1] * 7, "max_tokens": 5}}, 12),
        ({"kind": "tokens", "body": {"prompt": [1]}}, 257),
        ({"kind": "completions", "body": {"prompt": "x" * 9, "max_completion_tokens": 5}}, 8),
        ({"kind": "completions", "body": {"prompt": "\u4f60" * 4, "max_tokens": 1}}, 4),
        (
            {
                "kind": "chat.completions",
                "body": {
                    "messages": [
                        {"role": "user", "content": "x" * 8},
                        {"role": "user", "content": [{"type": "text", "text": "y" * 4}]},
                    ],
                    "max_tokens": 10,
                },
            },
            13,
        ),
        ({"kind": "completions", "body": {"prompt": 7, "max_tokens": "many"}}, 256),
        ({"kind": "chat.completions", "body": {"messages": [3, {"content": None}]}}, 258),
        ({"kind": "tokens", "body": {"prompt": [1], "max_tokens": 1 << 60}}, 1 << 31),
    ],
)
def test_a_request_counts_for_its_prompt_and_the_most_it_may_generate(fields, tokens):
    assert BYTES_PER_TOKEN == 4
    assert MAX_TOKENS_PER_REQUEST == 1 << 31
    assert estimated_tokens(make_request(**fields)) == tokens


def test_a_paused_queue_is_not_read_and_goes_on_where_it_was(broker):
    broker.submit_many([make_request(id=name) for name in "ab"])
    broker.pause("repairs")
    assert broker.peek(count=9, block_seconds=0) == []
    assert broker.peek(count=9, block_seconds=0.05) == []
    assert broker.submit(make_request(id="c")).created, "what comes in meanwhile waits"
    broker.resume()
    broker.resume()
    assert broker.pause_reason() is None
    entries = broker.peek(count=9, block_seconds=0)
    assert [entry.request_id for entry in entries] == ["a", "b", "c"]


def test_once_a_pause_is_there_no_claim_is_made_not_even_of_what_was_read_before(broker):
    broker.submit(make_request(id="a", priority="high"))
    entries = broker.peek(count=1, block_seconds=0)
    broker.pause()
    for _ in range(2):
        assert broker.claim(entries) == [NotClaimed("a", NotClaimedReason.PAUSED)]
    assert broker.status("a").state is State.QUEUED
    assert sum(broker.queue_depth().values()) == 1
    broker.resume()
    assert claim_next(broker).claim.request_id == "a"


def test_what_runs_when_a_pause_comes_runs_to_its_end(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.pause()
    assert broker.heartbeat([claimed.claim])[0].alive
    assert broker.commit([make_item(claimed.claim, 0, 2, final=True)])[0].status == "ok"
    assert broker.status("a").state is State.COMPLETED


def test_a_cancelled_request_ends_even_while_its_queue_is_paused(broker):
    broker.submit(make_request(id="a"))
    broker.pause()
    assert broker.cancel("a") is State.CANCELLED
