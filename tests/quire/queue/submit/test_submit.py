"""SUBMIT and CANCEL: one request is enqueued once, and a cancelled one never runs."""

from datetime import timedelta

import pytest
from redis.exceptions import OutOfMemoryError

from quire.errors import InvalidRequest, QueueFull, UnknownRequest
from quire.queue.claim.claim import Claimed
from quire.transport.connection import connect
from quire.wire.output import FinishReason, State
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_all,
    read_and_claim,
    submit_and_claim,
)
from tests.quire.servers import on_the_real_server


def test_a_submit_that_is_repeated_enqueues_nothing_more(broker):
    request = make_request()
    first, again = broker.submit(request), broker.submit(request)
    assert (first.created, again.created) == (True, False)
    assert first.request_id == again.request_id == request.id
    assert sum(broker.queue_depth().values()) == 1


def test_a_submit_repeated_after_the_end_answers_the_end_and_runs_nothing(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2, final=True)])
    assert broker.submit(make_request(id="a")).state is State.COMPLETED
    assert sum(broker.queue_depth().values()) == 0


def test_an_idempotency_key_leads_to_the_request_that_used_it_first(broker):
    first = broker.submit(make_request(idempotency_key="k"))
    again = broker.submit(make_request(idempotency_key="k"))
    assert again.request_id == first.request_id and not again.created
    assert sum(broker.queue_depth().values()) == 1


def test_idempotency_keys_belong_to_their_tenant(broker):
    ids = {
        broker.submit(make_request(idempotency_key="k", tenant=tenant)).request_id
        for tenant in ("a", "b")
    }
    assert len(ids) == 2


def test_an_idempotency_key_is_free_again_when_its_request_is_forgotten(broker, connection):
    first = broker.submit(make_request(idempotency_key="k"))
    connection.delete(*broker.keys.of_request(first.request_id))
    again = broker.submit(make_request(idempotency_key="k"))
    assert again.created and again.request_id != first.request_id
    assert broker.submit(make_request(idempotency_key="k")).request_id == again.request_id


def test_an_idempotency_key_outlives_a_request_that_runs_and_is_kept_for_long(
    make_broker, connection
):
    """The keys of a request are renewed as it runs, and kept after its end; this one never is."""
    broker = make_broker(max_queue_seconds=60, retention_seconds=60)
    broker.submit(make_request(idempotency_key="k"))
    left = connection.ttl(broker.keys.idempotency("default", "k"))
    assert timedelta(days=7) < timedelta(seconds=left) <= timedelta(days=7, minutes=2)


def test_a_full_backlog_refuses_what_is_new_and_knows_what_is_not(make_broker):
    broker = make_broker(max_backlog=2)
    requests = [make_request() for _ in range(2)]
    broker.submit_many(requests)
    with pytest.raises(QueueFull, match="backlog"):
        broker.submit(make_request())
    assert not broker.submit(requests[0]).created
    claim_next(broker)
    assert broker.submit(make_request()).created


def test_a_refusal_of_some_names_those_that_are_in_the_queue(make_broker):
    broker = make_broker(max_backlog=2)
    requests = [make_request() for _ in range(5)]
    with pytest.raises(QueueFull) as caught:
        broker.submit_many(requests)
    assert caught.value.accepted == tuple(request.id for request in requests[:2])


@pytest.mark.real_redis
def test_a_server_out_of_memory_is_a_full_queue_and_changes_nothing(real_server, real_broker):
    if real_server.kind == "url":
        pytest.skip("the memory limit of a server that is not ours is left alone")
    claimed = submit_and_claim(real_broker, id="a")
    with connect(real_server.url) as admin:
        admin.config_set("maxmemory", 1)
        try:
            for call in (
                lambda: real_broker.submit(make_request(id="refused")),
                lambda: real_broker.commit([make_item(claimed.claim, 0, 1)]),
            ):
                with pytest.raises(QueueFull, match="memory") as caught:
                    call()
                assert isinstance(caught.value.__cause__, OutOfMemoryError)
        finally:
            admin.config_set("maxmemory", 0)
    with pytest.raises(UnknownRequest):
        real_broker.status("refused")
    assert real_broker.status("a").published == 0


@on_the_real_server
def test_many_requests_are_submitted_in_order(broker):
    requests = [make_request() for _ in range(600)]
    answers = broker.submit_many(requests)
    assert [answer.request_id for answer in answers] == [request.id for request in requests]
    entries = broker.peek(count=1000, block_seconds=0)
    assert [entry.request_id for entry in entries] == [request.id for request in requests]


def test_a_request_over_the_inline_cap_is_refused_before_anything_is_sent(broker):
    with pytest.raises(InvalidRequest, match="the limit is"):
        broker.submit_many([make_request(), make_request(body={"prompt": "x" * (1 << 20)})])
    assert sum(broker.queue_depth().values()) == 0


def test_the_life_of_a_request_begins_bounded_by_its_deadline(make_broker, connection):
    broker = make_broker(max_queue_seconds=1000, retention_seconds=100)
    soon = broker.now_ms() + 10_000
    broker.submit_many([make_request(id="soon", deadline_ms=soon), make_request(id="plain")])
    for request_id, seconds in (("soon", 110), ("plain", 1100)):
        for key in broker.keys.of_request(request_id)[:2]:
            assert seconds - 60 < connection.pttl(key) / 1000 <= seconds


def test_a_request_cancelled_in_the_queue_ends_at_once_and_never_runs(broker, connection):
    request = make_request(metadata={"row": 7})
    broker.submit(request)
    assert broker.cancel(request.id) is State.CANCELLED
    chunks, completion = read_all(broker, request.id)
    assert (chunks, completion.state) == ([], State.CANCELLED)
    assert completion.finish_reason is FinishReason.CANCELLED
    assert (completion.error.code, completion.metadata) == ("cancelled", {"row": 7})
    assert sum(broker.queue_depth().values()) == 0
    stream = broker.keys.ingress(request.priority)
    assert connection.xlen(stream) == 1, "an undelivered entry is never deleted"
    assert broker.peek(count=1, block_seconds=0.01) == []
    assert connection.xlen(stream) == 0
    assert connection.exists(broker.keys.body(request.id)) == 0


def test_a_cancelled_request_keeps_its_one_record_however_often_it_is_cancelled(broker, connection):
    request = make_request()
    broker.submit(request)
    assert [broker.cancel(request.id) for _ in range(3)] == [State.CANCELLED] * 3
    assert connection.xlen(broker.keys.output(request.id)) == 1


def test_a_running_request_learns_of_its_cancellation_from_commit_and_heartbeat(broker):
    claimed = submit_and_claim(broker)
    assert broker.cancel(claimed.claim.request_id) is State.RUNNING
    (reply,) = broker.commit([make_item(claimed.claim, 0, 1)])
    assert reply.cancel_requested and reply.published == 1
    (beat,) = broker.heartbeat([claimed.claim])
    assert beat.alive and beat.cancel_requested


def test_cancelling_what_has_ended_answers_how_it_ended(broker):
    claimed = submit_and_claim(broker)
    broker.commit([make_item(claimed.claim, 0, 2, final=True)])
    assert broker.cancel(claimed.claim.request_id) is State.COMPLETED


def test_cancelling_an_unknown_request_touches_nothing(broker):
    with pytest.raises(UnknownRequest):
        broker.cancel("nobody")
    broker.submit(make_request(id="nobody"))
    assert isinstance(read_and_claim(broker), Claimed)


def test_the_status_of_an_unknown_request_is_a_typed_error(broker):
    with pytest.raises(UnknownRequest, match="nobody"):
        broker.status("nobody")


def test_the_status_tells_where_a_request_stands(broker):
    deadline = broker.now_ms() + 60_000
    claimed = submit_and_claim(broker, priority="high", deadline_ms=deadline)
    broker.commit([make_item(claimed.claim, 0, 3)])
    status = broker.status(claimed.claim.request_id)
    assert (status.state, status.published, status.attempts) == (State.RUNNING, 3, 1)
    assert (status.priority.name, status.deadline_ms) == ("HIGH", deadline)
    assert abs(status.submitted_ms - broker.now_ms()) < 60_000
