"""What becomes of a script that fails: what may pass is told from what would come again."""

import asyncio
import logging

import pytest
import redis
import redis.asyncio
from redis.exceptions import (
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from quire.client.client import Client
from quire.client.client_async import AsyncClient
from quire.errors import BrokerUnavailable, ProtocolError, QueueFull
from quire.queue.lease.moving import Expired, Reaped
from quire.transport.script_calls import (
    MAX_BYTES_PER_PIPELINE,
    MAX_CALLS_PER_PIPELINE,
    ScriptCall,
    of_its_kind,
    pipelines_of,
    script_error,
)
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request, submit_and_claim
from tests.quire.loop_face import async_twin

OLD_SERVER = "Error running script (call to f_00): @user_script:12: @user_script: 12: "


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (ResponseError("user_script:3: attempt to index local 'x' (a nil value)"), ProtocolError),
        (ResponseError("WRONGTYPE Operation against a key, on @user_script:1."), ProtocolError),
        (ResponseError("The ID specified in XADD is equal or smaller than"), ProtocolError),
        (ResponseError(OLD_SERVER + "WRONGTYPE Operation against a key"), ProtocolError),
        (ResponseError("MISCONF Errors writing to the AOF file, on @user_script:1."), None),
        (ResponseError(OLD_SERVER + "-READONLY You can't write against a read only"), None),
        (ResponseError("BUSY Redis is busy running a script."), None),
        (ResponseError("The user executing the script can't run this command"), None),
        (NoPermissionError("User w has no permissions to run the 'evalsha' command"), None),
        (ReadOnlyError("You can't write against a read only replica."), None),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'"), QueueFull),
    ],
)
def test_an_error_that_would_come_again_is_told_from_one_that_may_pass(reply, kind):
    error = script_error(reply)
    assert type(error) is (kind or BrokerUnavailable)
    assert error.__cause__ is reply


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("-OOM command not allowed when used memory > 'maxmemory'.", OutOfMemoryError),
        ("-READONLY You can't write against a read only replica.", ReadOnlyError),
        ("-MISCONF Errors writing to the AOF file", ResponseError),
        ("user_script:3: attempt to index local 'x' (a nil value)", ResponseError),
    ],
)
def test_what_an_old_server_refuses_a_script_for_is_told_as_by_a_new_one(text, kind):
    reply = of_its_kind(ResponseError(OLD_SERVER + text))
    assert (type(reply), str(reply)) == (kind, OLD_SERVER + text)
    assert of_its_kind(b"OK") == b"OK"


@pytest.fixture
def damaged(broker, connection):
    """Three running requests; the record of the second is not ours any more."""
    broker.submit_many([make_request(id=name) for name in "abc"])
    claims = [claim_next(broker).claim for _ in range(3)]
    kept = connection.dump(broker.keys.request("b"))
    connection.delete(broker.keys.request("b"))
    connection.set(broker.keys.request("b"), "foreign", ex=60)
    yield claims
    if connection.type(broker.keys.request("b")) == b"string":
        connection.delete(broker.keys.request("b"))
        connection.restore(broker.keys.request("b"), 60_000, kept)


def test_a_commit_that_can_never_succeed_says_so_at_once(broker, damaged):
    with pytest.raises(ProtocolError, match="would fail again"):
        broker.commit([make_item(claim, 0, 1) for claim in damaged])
    for claim, status in zip(damaged, ("replayed", None, "ok"), strict=True):
        if status:
            assert broker.commit([make_item(claim, 0, 1)])[0].status == status


def test_a_single_call_that_can_never_succeed_says_so_at_once(broker, damaged):
    with pytest.raises(ProtocolError):
        broker.heartbeat([damaged[1]])


def test_a_damaged_request_does_not_keep_the_others_from_being_reaped(
    broker, clockwork, damaged, caplog
):
    for claim in damaged:
        clockwork.expire_lease(claim.request_id)
    with caplog.at_level(logging.ERROR, logger="quire.queue.repair.damage"):
        assert {Reaped("b", State.FAILED), Reaped("c", State.QUEUED)} <= set(broker.reap())
    assert "reap of b" in caplog.text
    assert [broker.status(name).state for name in "ac"] == [State.QUEUED] * 2
    assert broker.reap() == []


def test_a_damaged_request_does_not_keep_the_others_from_their_deadline(broker, connection):
    broker.submit_many([make_request(id=name, deadline_ms=1) for name in "abc"])
    log = broker.keys.output("b")
    connection.set(log, "foreign", ex=60)
    expired = broker.expire()
    assert {Expired("b", State.FAILED), Expired("c", State.EXPIRED)} <= set(expired)
    assert [broker.status(name).state for name in "ac"] == [State.EXPIRED] * 2
    assert broker.expire() == []


def test_a_transition_that_lost_its_server_may_be_tried_again(broker, connection, monkeypatch):
    claimed = submit_and_claim(broker, id="a")

    def refuse(*_):
        raise ResponseError("MISCONF Errors writing to the AOF file")

    monkeypatch.setattr(connection, "evalsha", refuse)
    with pytest.raises(BrokerUnavailable, match="MISCONF"):
        broker.heartbeat([claimed.claim])


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([0] * (MAX_CALLS_PER_PIPELINE + 1), [MAX_CALLS_PER_PIPELINE, 1]),
        ([MIB] * 20, [8, 8, 4]),
        ([MIB, MAX_BYTES_PER_PIPELINE, MIB], [1, 1, 1]),
        ([2 * MAX_BYTES_PER_PIPELINE, 1, 1], [1, 2]),
    ],
)
def test_what_is_sent_at_once_has_a_limit_of_calls_and_of_bytes(sizes, parts):
    calls = [ScriptCall((), (bytes(size), 7)) for size in sizes]
    found = list(pipelines_of(calls))
    assert [len(part) for part in found] == parts
    assert [call for part in found for call in part] == calls


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
def test_large_requests_go_out_in_as_many_pipelines_as_it_takes(
    broker, connection, monkeypatch, is_async
):
    """All in one would outlast the patience of the socket, each time it is sent again."""
    kind = redis.asyncio.client.Pipeline if is_async else redis.client.Pipeline
    execute, sent = kind.execute, []

    def noting(pipeline, *arguments, **options):
        sent.append(len(pipeline.command_stack))
        return execute(pipeline, *arguments, **options)

    monkeypatch.setattr(kind, "execute", noting)
    prompt = "x" * (MAX_BYTES_PER_PIPELINE // 16)
    requests = [make_request(kind="completions", body={"prompt": prompt}) for _ in range(20)]
    queue = broker.keys.queue
    if is_async:
        asyncio.run(submit_in_loop(requests, async_twin(connection), queue=queue))
    else:
        Client(connection, queue=queue).submit_many(requests)
    assert max(sent) == 15
    assert {broker.status(request.id).state for request in requests} == {State.QUEUED}


async def submit_in_loop(requests, connection, *, queue):
    async with AsyncClient(connection, queue=queue) as client:
        await client.submit_many(requests)
    await connection.aclose()
