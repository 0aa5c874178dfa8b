"""EXTEND adds where all is as the worker believes; whatever is not, COMMIT judges."""

from dataclasses import replace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.errors import ProtocolError
from quire.queue.broker import Broker
from quire.queue.lease.lease import BackOff
from quire.queue.publish.commit import CommitCalls, CommitStatus
from quire.wire.logprobs import PromptToken, TopLogprob
from quire.wire.output import ErrorInfo
from tests.quire.builders import (
    Snapshot,
    claim_next,
    logprob_at,
    make_item,
    read_all,
    submit_and_claim,
    token_at,
    token_ids_of,
    with_logprobs,
)


@pytest.fixture
def claimed(broker):
    """A request whose log has begun, so that EXTEND may add the next tokens."""
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    return claimed


@pytest.mark.parametrize("text_ends", [(1,), ()], ids=["with ends of texts", "without"])
def test_a_log_that_is_gone_is_sent_again_and_lives_no_longer_than_the_others(
    broker, connection, claimed, text_ends
):
    connection.delete(broker.keys.output("a"))
    item = replace(make_item(claimed.claim, 2, 3), text_ends=text_ends)
    (reply,) = broker.commit([item])
    assert (reply.status, reply.published) == (CommitStatus.REWIND, 0)
    broker.commit([make_item(claimed.claim, 0, 3)])
    assert token_ids_of(read_all(broker, "a")[0]) == [token_at(index) for index in range(3)]
    assert connection.pttl(broker.keys.output("a")) > 0


def test_extend_and_commit_write_the_same_log(broker, connection, claimed):
    broker.commit([make_item(claimed.claim, 2, 5)])
    broker.commit([replace(make_item(claimed.claim, 5, 6), text_ends=())])
    entries = connection.xrange(broker.keys.output("a"))
    assert [sorted(fields) for _, fields in entries] == [
        [b"at_ms", b"ends", b"from", b"ids", b"prefix", b"text"],
        [b"at_ms", b"ends", b"from", b"ids", b"prefix", b"text"],
        [b"at_ms", b"from", b"ids", b"prefix", b"text"],
    ]
    broker.commit([make_item(claimed.claim, 6, 8, final=True)])
    chunks, completion = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(8)]
    assert completion.prefix_hash == broker.status("a").prefix_hash == chunks[-1].prefix_hash


def test_log_probabilities_stand_in_the_log_by_either_way_and_leave_its_hash_as_it_is(broker):
    claims = [submit_and_claim(broker, id=name).claim for name in "ab"]
    for start, end, final in ((0, 2, False), (2, 5, False), (5, 6, True)):
        items = [make_item(claim, start, end, final=final) for claim in claims]
        broker.commit([with_logprobs(items[0]), items[1]])
    told, untold = read_all(broker, "a"), read_all(broker, "b")
    assert [chunk.logprobs for chunk in told[0]] == [
        tuple(map(logprob_at, range(start, end))) for start, end in ((0, 2), (2, 5), (5, 6))
    ]
    assert [chunk.logprobs for chunk in untold[0]] == [()] * 3
    for chunks, completion in (told, untold):
        assert token_ids_of(chunks) == [token_at(index) for index in range(6)]
        assert completion.prefix_hash == untold[1].prefix_hash


def test_the_prompt_stands_in_the_first_entry_and_leaves_the_hash_as_it_is(broker):
    prompt = (PromptToken(8, None, "x"), PromptToken(9, -1.5, "y", (TopLogprob(7, -0.5, "z"),)))
    claims = [submit_and_claim(broker, id=name).claim for name in "abc"]
    items = [make_item(claim, 0, 2) for claim in claims]
    told = [replace(items[0], told_prompt=prompt), with_logprobs(items[1]), items[2]]
    told[1] = replace(told[1], told_prompt=prompt)
    for _ in range(2):
        broker.commit(told)
    broker.commit([make_item(claim, 2, 3, final=True) for claim in claims])
    logs = [read_all(broker, name) for name in "abc"]
    assert [[chunk.prompt_tokens for chunk in chunks] for chunks, _ in logs] == [
        [prompt, ()],
        [prompt, ()],
        [(), ()],
    ]
    assert len(logs[1][0][0].logprobs) == 2 and not logs[0][0][0].logprobs
    assert len({completion.prefix_hash for _, completion in logs}) == 1


def test_a_commit_leaves_the_lease_to_the_heartbeat(broker, connection):
    claims = [submit_and_claim(broker, id=name).claim for name in "abc"]
    connection.zadd(broker.keys.lease, {claim.request_id: 1 for claim in claims})
    for start in (0, 1):
        # The first tokens of a claim are judged by COMMIT, those after them added by EXTEND.
        replies = broker.commit([make_item(claim, start, start + 1) for claim in claims])
        assert [reply.status for reply in replies] == [CommitStatus.OK] * 3
        leases = connection.zrange(broker.keys.lease, 0, -1, withscores=True)
        assert [expiry for _, expiry in leases] == [1, 1, 1]
    assert all(beat.alive for beat in broker.heartbeat(claims))
    assert all(connection.zscore(broker.keys.lease, name) > 1 for name in "abc")


def test_items_for_extend_and_for_commit_and_with_and_without_a_group_stand_in_one_call(broker):
    names = ["a", "g~b", "c", "g~d", "e"]
    claims = [submit_and_claim(broker, id=name).claim for name in names]
    broker.commit([make_item(claim, 0, 2) for claim in claims[:3]])
    items = [make_item(claims[0], 2, 3), make_item(claims[1], 2, 4, final=True)]
    items += [make_item(claims[2], 2, 5), make_item(claims[3], 0, 1, final=True)]
    items.append(make_item(claims[4], 1, 2))
    replies = [(reply.status.value, reply.published) for reply in broker.commit(items)]
    assert replies == [("ok", 3), ("ok", 4), ("ok", 5), ("ok", 1), ("rewind", 0)]
    for name, length in zip(names[:4], (3, 4, 5, 1), strict=True):
        chunks, completion = read_all(broker, name)
        assert token_ids_of(chunks) == [token_at(index) for index in range(length)]
        assert (completion is not None) == name.startswith("g~")


def test_a_large_commit_outlives_a_server_that_turns_its_first_connection_down(
    broker, connection, monkeypatch
):
    names = [f"r{number}" for number in range(16)]
    claims = [submit_and_claim(broker, id=name).claim for name in names]
    broker.commit([make_item(claim, 0, 1) for claim in claims])
    pool = connection.connection_pool
    connect = pool.get_connection

    def turn_down_once(*arguments):
        monkeypatch.setattr(pool, "get_connection", connect)
        raise RedisConnectionError("the server has just gone")

    monkeypatch.setattr(pool, "get_connection", turn_down_once)
    replies = broker.commit([make_item(claim, 1, 3) for claim in claims])
    assert [(reply.status, reply.published) for reply in replies] == [(CommitStatus.OK, 3)] * 16
    for name in names:
        assert token_ids_of(read_all(broker, name)[0]) == [token_at(index) for index in range(3)]


def test_a_cancelled_request_is_told_so_with_all_its_next_tokens(broker, claimed):
    """The first of these replies may be lost."""
    broker.cancel("a")
    for index in (2, 3, 4):
        (reply,) = broker.commit([make_item(claimed.claim, index, index + 1)])
        assert (reply.status, reply.cancel_requested) == (CommitStatus.OK, True)


@pytest.mark.real_redis
def test_extend_adds_what_is_usual_and_asks_little_for_it(real_broker, real_connection):
    claims = [submit_and_claim(real_broker, id=name).claim for name in "ab"]
    real_broker.commit([make_item(claim, 0, 1) for claim in claims])
    real_connection.config_resetstat()
    real_broker.commit([make_item(claim, 1, 2) for claim in claims])
    calls = {
        name: stats["calls"]
        for name, stats in real_connection.info("commandstats").items()
        # Redis 6.2 does not tell subcommands apart.
        if name not in ("cmdstat_config", "cmdstat_config|resetstat")
    }
    assert calls.pop("cmdstat_evalsha") + calls.pop("cmdstat_eval", 0) >= 1
    assert calls == {
        "cmdstat_hmget": 1, "cmdstat_xread": 1, "cmdstat_xadd": 2, "cmdstat_hset": 1,
        # One time for the whole call.
        "cmdstat_time": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "take",
    [
        lambda broker, claim: broker.cancel("a"),
        lambda broker, claim: broker.release([claim]),
        lambda broker, claim: broker.fail(claim, ErrorInfo("x", "y"), retry=BackOff()),
        lambda broker, claim: broker.fail(claim, ErrorInfo("x", "y")),
        lambda broker, claim: broker.dead_letter(claim, "tired"),
        lambda broker, claim: broker.commit([make_item(claim, 4, 5, final=True)]),
        lambda broker, claim: broker.reap(),
    ],
    ids=["cancel", "release", "fail and retry", "fail", "dead letter", "end", "reap"],
)
def test_whatever_takes_a_request_from_its_claim_takes_its_place(
    broker, connection, clockwork, claimed, take
):
    broker.commit([make_item(claimed.claim, 2, 4)])
    before = broker.status("a")
    assert (before.published, connection.hlen(broker.keys.log_positions)) == (4, 1)
    clockwork.expire_lease("a")
    take(broker, claimed.claim)
    assert connection.exists(broker.keys.log_positions) == 0
    # What was told of a request is never taken back.
    after = broker.status("a")
    assert after.published >= 4
    assert after.published > 4 or after.prefix_hash == before.prefix_hash


def test_a_worker_that_is_new_to_a_claim_is_told_where_it_stands(broker, connection, claimed):
    other = Broker(connection, queue=broker.keys.queue)
    for end in (3, 4, 5):
        (reply,) = other.commit([make_item(claimed.claim, end - 1, end)])
        assert (reply.status, reply.published) == (CommitStatus.OK, end)
    # The first of the two knows an older place now, and is judged.
    (reply,) = broker.commit([make_item(claimed.claim, 2, 3)])
    assert (reply.status, reply.published) == (CommitStatus.REPLAYED, 5)
    (reply,) = broker.commit([make_item(claimed.claim, 5, 6)])
    assert reply.status is CommitStatus.OK
    assert token_ids_of(read_all(broker, "a")[0]) == [token_at(index) for index in range(6)]


def test_more_claims_than_are_remembered_are_committed_all_the_same(broker, monkeypatch):
    monkeypatch.setattr("quire.queue.publish.commit.MAX_CLAIMS", 3)
    claims = [submit_and_claim(broker, id=name).claim for name in "abcdefg"]
    for start in range(3):
        replies = broker.commit([make_item(claim, start, start + 1) for claim in claims])
        assert {reply.status for reply in replies} == {CommitStatus.OK}
        assert len(broker._commit_calls._known) <= 3


def test_a_place_that_redis_lost_is_sent_again_from_there(broker, connection, claimed):
    disk = Snapshot(connection, broker)
    for start in (2, 3, 4):
        broker.commit([make_item(claimed.claim, start, start + 1)])
    disk.restore()
    (reply,) = broker.commit([make_item(claimed.claim, 5, 6)])
    assert (reply.status, reply.published) == (CommitStatus.REWIND, 2)
    for start in (2, 3, 4):
        (reply,) = broker.commit([make_item(claimed.claim, start, start + 1)])
        assert reply.status is CommitStatus.OK
    chunks, _ = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(5)]
    assert chunks[-1].prefix_hash == broker.status("a").prefix_hash


def test_an_epoch_that_redis_gave_twice_extends_nothing_for_the_first(
    broker, connection, clockwork, claimed
):
    disk = Snapshot(connection, broker)
    clockwork.expire_lease("a")
    broker.reap()
    first = claim_next(broker)
    broker.commit([make_item(first.claim, 2, 3)])
    disk.restore()
    clockwork.expire_lease("a")
    broker.reap()
    second = claim_next(broker)
    assert first.claim.epoch == second.claim.epoch
    broker.commit([make_item(second.claim, 2, 3)])
    (reply,) = broker.commit([make_item(first.claim, 3, 4)])
    assert reply.status is CommitStatus.FENCED


def test_a_log_that_is_no_log_costs_its_neighbours_nothing_but_time(broker, connection):
    claims = [submit_and_claim(broker, id=name).claim for name in "abc"]
    broker.commit([make_item(claim, 0, 1) for claim in claims])
    connection.set(broker.keys.output("b"), "spoilt", keepttl=True)
    with pytest.raises(ProtocolError):
        broker.commit([make_item(claim, 1, 2) for claim in claims])
    with pytest.raises(ProtocolError):
        broker.commit([make_item(claims[1], 1, 2)])
    for claim in (claims[0], claims[2]):
        (reply,) = broker.commit([make_item(claim, 1, 2)])
        assert reply.published == 2
    connection.delete(broker.keys.output("b"))


def test_a_log_without_a_hash_has_no_place(broker, connection, claimed):
    connection.hdel(broker.keys.request("a"), "prefix")
    connection.delete(broker.keys.log_positions)
    for start in (2, 3):
        (reply,) = broker.commit([make_item(claimed.claim, start, start + 1)])
        assert (reply.status, reply.published) == (CommitStatus.OK, start + 1)
    assert connection.exists(broker.keys.log_positions) == 0


def test_what_is_known_of_a_claim_is_forgotten_with_its_end(broker):
    calls = CommitCalls(broker.keys)
    claim, fenced = (submit_and_claim(broker, id=name).claim for name in "ab")
    begun = [make_item(claim, 0, 2), make_item(fenced, 0, 2)]
    calls.committed(begun, b"ok 2 0 7.9\nok 2 0 7.9")
    more = [make_item(claim, 2, 3), make_item(fenced, 2, 3)]
    assert calls.extension(more).numbers == [0, 1]
    ended = [make_item(claim, 2, 3, final=True), make_item(fenced, 2, 3)]
    calls.committed(ended, b"ok 3 0 8.9\nfenced 0 0 -")
    assert not calls._known
