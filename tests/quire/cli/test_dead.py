"""`quire dead`: what was given up is listed, shown, queued again and deleted."""

import json

import pytest

from tests.quire.builders import claim_next, make_request, pass_moment

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


def records(output):
    return [json.loads(line) for line in output.splitlines()]


def bury(broker, request_id):
    broker.submit(make_request(id=request_id))
    broker.dead_letter(claim_next(broker).claim, "unreadable")


def test_dead_letters_are_listed_shown_requeued_and_purged(quire, real_broker):
    for request_id in ("a", "b", "c"):
        bury(real_broker, request_id)
    listed = records(quire("dead", "ls", "--json")[1])
    assert [letter["request_id"] for letter in listed] == ["c", "b", "a"]
    assert "unreadable" in quire("dead", "ls")[1]
    (shown,) = records(quire("dead", "show", "a", "--json")[1])
    assert shown["original"]["body"] == {"prompt": [1, 2, 3]}
    assert quire("dead", "requeue", "a")[:2] == (0, "a  queued\n")
    assert quire("dead", "purge", "b", "nobody")[0] == 3
    assert quire("dead", "purge")[0] == 2
    assert quire("dead", "purge", "--all")[1] == "purged 1\n"
    assert quire("dead", "ls", "--json")[1] == ""


def test_a_letter_whose_id_a_later_request_has_is_not_requeued(quire, real_broker, real_connection):
    bury(real_broker, "a")
    bury(real_broker, "b")
    (old,) = records(quire("dead", "show", "a", "--json")[1])
    real_connection.delete(*real_broker.keys.of_request("a"))
    pass_moment(real_broker)
    real_broker.submit(make_request(id="a"))
    code, output, complaint = quire("dead", "requeue", "a", "b")
    assert (code, output) == (3, "b  queued\n")
    told = f"a: the request of the letter {old['letter']} is gone, a later one has its id"
    assert told in complaint
