"""The commands go on where the workers of a later version say more of themselves."""

import json

import msgpack
import pytest

from quire import Client

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]

#: What no version knows yet, in every form that msgpack has.
LATER = {
    "queue_depth": 7, "share": 0.5, "is_able": True, "mood": "good", "nothing": None,
    "parts": [1, {"a": 2}], "devices": {"0": {"name": "x", "free": [1, 2]}}, "raw": b"\xff\x00",
}  # fmt: skip


@pytest.fixture
def later(real_broker, real_connection):
    """A worker of this version, and beside it one of a later one, in a state that is new, too."""
    real_broker.beat_worker("now", "ready", {"running": 1.0}, model="m")
    known = {"running": 2.0, "claims": 3.0, "model": "m", "adapters": {"sql": "1"}}
    word = b"%d warming " % real_broker.now_ms() + msgpack.packb(LATER | known)
    real_connection.hset(real_broker.keys.workers, "later", word)


def test_status_shows_a_later_worker_with_what_is_known_of_it(quire, later):
    code, out, err = quire("status")
    assert (code, err) == (0, "")
    (line,) = [line.split() for line in out.splitlines() if line.startswith("later ")]
    assert line[:2] == ["later", "warming"] and line[3:5] == ["sql", "3"]
    code, out, _ = quire("status", "--json")
    workers = {one["name"]: one for one in json.loads(out)["workers"]}
    assert code == 0 and workers.keys() == {"now", "later"}
    assert workers["later"]["adapters"] == {"sql": "1"} and workers["now"]["load"] == {"running": 1}


def test_so_do_the_others_that_look_at_workers(quire, later, real_broker):
    assert "later (warming), now (ready)" in quire("doctor", "--no-torch")[1]
    assert quire("drain", "--all", "--no-wait")[0] == 0
    assert real_broker.control().drain_wishes == {"later", "now"}
    assert Client(real_broker).adapters() == {"m": ["sql"]}


@pytest.mark.parametrize("word", [b"", b"later", b"\xff \xff \xff", b"1 ready \xc7\x01\x05x"])
def test_a_word_that_cannot_be_read_at_all_hides_no_other(
    quire, later, real_broker, real_connection, word
):
    real_connection.hset(real_broker.keys.workers, "strange", word)
    code, out, _ = quire("status")
    assert code == 0 and "\nnow " in out and "\nlater " in out and "strange" not in out
