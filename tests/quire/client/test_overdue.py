"""Where no worker is alive, those who wait for an end that is due see to it themselves."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import Client
from quire.client.reader import SharedReadsBroker
from quire.errors import BrokerUnavailable, Cancelled, DeadlineExceeded, WaitTimeout
from quire.transport.connection import connect
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, token_at

#: Long enough for any machine; where nobody sees to the end, WaitTimeout comes in its place.
TIMEOUT = 30


@pytest.fixture
def client(broker, monkeypatch):
    # How often an idle reader looks whether the request is still there.
    for module in ("handle", "group_handle"):
        monkeypatch.setattr(f"quire.client.{module}.MAX_BLOCK_SECONDS", 0.1)
    return Client(broker)


def lost_in_a_worker(broker, clockwork, *, num_tokens=2):
    """The next request runs in a worker that has published tokens, and is gone."""
    claim = claim_next(broker).claim
    broker.commit([make_item(claim, 0, num_tokens)])
    clockwork.expire_lease(claim.request_id)
    return claim


def test_a_deadline_in_the_queue_ends_the_request_at_its_time(client, broker):
    handle = client.submit("x", deadline=0.2)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        handle.result(timeout=TIMEOUT)
    assert handle.status().state is State.EXPIRED
    assert broker.peek(count=1) == []


def test_a_reader_of_the_stream_is_told_too(client):
    with pytest.raises(DeadlineExceeded):
        list(client.submit("x", deadline=0.2).stream())


def test_what_a_lost_worker_has_published_comes_with_the_end(client, broker, clockwork):
    handle = client.submit("x", deadline=60)
    lost_in_a_worker(broker, clockwork)
    clockwork.bring_deadline(handle.request_id)
    with pytest.raises(DeadlineExceeded) as caught:
        handle.result(timeout=TIMEOUT)
    assert caught.value.completion.token_ids == (token_at(0), token_at(1))


def test_so_it_is_with_a_cancelled_one(client, broker, clockwork):
    handle = client.submit("x")
    lost_in_a_worker(broker, clockwork)
    assert handle.cancel() is State.RUNNING
    with pytest.raises(Cancelled):
        handle.result(timeout=TIMEOUT)


def test_what_a_worker_holds_is_left_to_it(client, broker, clockwork):
    handle = client.submit("x", deadline=60)
    claim = claim_next(broker).claim
    clockwork.bring_deadline(handle.request_id)
    handle.cancel()
    with pytest.raises(WaitTimeout):
        handle.result(timeout=0.5)
    assert broker.end_overdue([handle.request_id]) == {}
    clockwork.expire_lease(handle.request_id)
    assert broker.end_overdue([handle.request_id]) == {handle.request_id: State.CANCELLED}
    assert broker.end_overdue([handle.request_id]) == {}
    assert broker.heartbeat([claim])[0].alive is False
    assert broker.reap() == []


def test_a_lease_that_is_over_is_no_reason_by_itself(client, broker, clockwork):
    group = client.submit_many([{"prompt": "x", "deadline": 60, "request_id": "a"}], group="g")
    lost_in_a_worker(broker, clockwork)
    assert (broker.overdue("g"), broker.overdue("other")) == (["g~a"], [])
    assert broker.end_overdue(broker.overdue("g")) == {}
    assert group.counts() == {State.RUNNING: 1}
    assert [reaped.state for reaped in broker.reap()] == [State.QUEUED]


def test_the_members_of_a_group_end_at_their_time(client, broker, clockwork):
    rows = [{"prompt": "x", "request_id": name, "deadline": 60} for name in "abc"]
    group = client.submit_many(rows, group="g")
    lost_in_a_worker(broker, clockwork)
    for name in "abc":
        clockwork.bring_deadline(f"g~{name}")
    ended = {completion.request_id: completion for completion in group.results(timeout=TIMEOUT)}
    assert set(ended) == {"g~a", "g~b", "g~c"}
    assert {completion.state for completion in ended.values()} == {State.EXPIRED}
    assert ended["g~a"].token_ids == (token_at(0), token_at(1))


@pytest.mark.parametrize("grouped", [False, True])
def test_who_may_only_read_waits_for_a_worker(client, broker, monkeypatch, grouped):
    def refused(*_):
        raise BrokerUnavailable("this user has no permissions to run the 'evalsha' command")

    row = {"prompt": "x", "deadline": 0.01}
    handle = client.submit_many([row], group="g") if grouped else client.submit(**row)
    monkeypatch.setattr(broker, "end_overdue", refused)
    with pytest.raises(WaitTimeout):
        handle.wait(timeout=0.5) if grouped else handle.result(timeout=0.5)
    monkeypatch.undo()
    handle.wait(timeout=TIMEOUT) if grouped else list(handle.follow())


@pytest.mark.real_redis
def test_a_hundred_deadlines_at_once_take_a_few_connections(real_server, real_broker):
    def code_of(handle):
        with pytest.raises(DeadlineExceeded) as caught:
            handle.result(timeout=TIMEOUT)
        return caught.value.completion.error.code

    with connect(real_server.url) as connection:
        client = Client(SharedReadsBroker(connection, queue=real_broker.keys.queue))
        handles = client.submit_many([{"prompt": "x", "deadline": 0.5}] * 100)
        before = len(real_broker.connection.client_list())
        with ThreadPoolExecutor(100) as threads:
            assert set(threads.map(code_of, handles)) == {"deadline_exceeded"}
        assert len(real_broker.connection.client_list()) - before <= 12
