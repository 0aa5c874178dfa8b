"""A key of the queue that is deleted while requests run is no loss: each has its one right end."""

import pytest

from quire.client.following import Following
from quire.queue.claim.claim import Claimed
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request, read_all, token_at
from tests.quire.builders import token_ids_of as ids_of

#: What is deleted. `open` is missing: the docs say what is lost with it.
DELETED = {
    **{
        name: lambda keys, name=name: [getattr(keys, name)]
        for name in (
            "arrival",
            "log_positions",
            "delay",
            "wait",
            "lease",
            "counts",
            "turn",
            "turns",
        )
    },
    "ranks": lambda keys: keys.all_ranks,
    "tickets": lambda keys: keys.all_ingress,
    "counts of a group": lambda keys: keys.of_group("g")[:1],
    "members of a group": lambda keys: keys.of_group("g")[1:2],
}

#: The requests, by where they are when a key is deleted. `parked` is the turn behind `turn`.
NAMES = ("runs", "turn", "g~runs", "parked", "g~waits", "waits", "later")
SESSIONS = {"turn": "s", "parked": "s", "g~runs": "other"}


def submit(broker, name, **fields):
    broker.submit(make_request(id=name, session_id=SESSIONS.get(name), **fields))


def begun(broker):
    """The claims of three requests, one of which has tokens that only its log position counts."""
    claims = {}
    for name in ("runs", "turn", "g~runs"):
        submit(broker, name)
        claims[name] = claim_next(broker).claim
    broker.commit([make_item(claims["runs"], 0, 1)])
    broker.commit([make_item(claims["runs"], 1, 18)])
    for name in ("parked", "g~waits", "waits"):
        submit(broker, name)
    submit(broker, "later", not_before_ms=broker.now_ms() + 3_600_000)
    return claims


def repair(broker):
    broker.restore(is_at_once=True)
    broker.balance()


@pytest.mark.parametrize("what", DELETED)
def test_requests_end_as_if_a_key_had_not_been_deleted(broker, connection, clockwork, what):
    claims = begun(broker)
    following = Following("runs")
    list(following.take(broker.read_output(following.position)["runs"]))
    assert connection.delete(*DELETED[what](broker.keys)), "there was no such key"
    following.silent(broker.status("runs"))
    for name, start in (("runs", 18), ("turn", 0), ("g~runs", 0)):
        (reply,) = broker.commit([make_item(claims[name], start, start + 1, final=True)])
        assert reply.status == "ok"
    repair(broker)
    clockwork.expire_delay("later")
    broker.promote()
    while candidates := broker.peek(count=9):
        for answer in broker.claim(candidates):
            assert isinstance(answer, Claimed)
            broker.commit([make_item(answer.claim, 0, 1, final=True)])
        repair(broker)
    assert {name: broker.status(name).state for name in NAMES} == dict.fromkeys(
        NAMES, State.COMPLETED
    )
    assert ids_of(read_all(broker, "runs")[0]) == [token_at(index) for index in range(19)]
    assert broker.group_counts("g") == {State.COMPLETED: 2}
    assert broker.num_open_members("g") == 0
    assert not connection.exists(broker.keys.turn, broker.keys.turns, broker.keys.log_positions)
