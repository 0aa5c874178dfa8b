"""What `quire status` and `quire top` show of a queue."""

import pytest

from quire.queue.control.limits import QueueLimits
from quire.queue.publish.commit import CommitItem
from quire.queue.rank.fairness import Fairness
from quire.records import Activity
from tests.quire.builders import claim_next, make_item, make_request, pass_moment
from tests.quire.cli.test_cli import records


def test_status_and_top_show_what_waits_and_who_works(quire, real_broker):
    real_broker.submit(make_request())
    real_broker.beat_worker("w-1", "ready", {"running": 2.0})
    (state,) = records(quire("status", "--json")[1])
    waiting = {row["priority"]: row["num_undelivered"] for row in state["ingress"]}
    assert waiting == {"low": 0, "normal": 1, "high": 0, "critical": 0}
    assert state["workers"][0]["load"] == {"running": 2.0}
    text = quire("status")[1]
    header, cells = (line.split() for line in text.splitlines()[-2:])
    told = dict(zip(header, cells, strict=True))
    assert {name: told[name] for name in header[:-1]} == {
        "worker": "w-1", "state": "ready", "model": "-", "adapters": "-", "running": "-",
        "kv_cache": "-", "tokens": "-",
    }  # fmt: skip
    adapters = dict.fromkeys(("d", "c", "b", "a", "e"), "abc")
    load = {"claims": 2.0, "kv_usage": 0.409, "generated": 12_345_678_901.0}
    real_broker.beat_worker("w-1", "ready", load, model="m", adapters=adapters)
    (state,) = records(quire("status", "--json")[1])
    assert state["workers"][0]["adapters"] == adapters
    row = "w-1     ready  m      a, b, c, d and 1 more  2        41%       12345678901  "
    assert row in quire("status")[1]
    assert len(records(quire("top", "--json", "--count", "2", "--interval", "0")[1])) == 2


def row_of(text):
    header, cells = text.splitlines()[:2]
    return dict(zip(header.split(), cells.split(), strict=True))


@pytest.mark.parametrize("verb", [("status",), ("top", "--count", "1", "--interval", "0")])
def test_status_and_top_tell_what_claimed_requests_do(quire, real_broker, verb):
    real_broker.submit_many([make_request(id=name) for name in "abcde"])
    real_broker.claim(real_broker.peek(count=4, block_seconds=0))
    doing = {"waiting": 2, "prefilling": 1, "decoding": 1, "preempted": 0}
    real_broker.beat_worker("w-1", "ready", doing)
    # Neither of these adds to the counts: a dead worker, and one that does not tell.
    real_broker.beat_worker("w-2", "stopped", doing)
    real_broker.beat_worker("w-3", "ready", {"running": 7.0})
    row = row_of(quire(*verb)[1])
    assert (row["waiting"], row["running"]) == ("1", "4")
    doings = "2 waiting in a worker, 1 prefilling, 1 decoding, as workers told up to 0."
    assert quire(*verb)[1].splitlines()[2].startswith(doings)
    (state,) = records(quire(*verb, "--json")[1])
    assert state["activities"] == doing


def test_status_of_a_request_tells_what_it_does(quire, real_broker):
    real_broker.submit_many([make_request(id=name) for name in "ab"])
    claims = {"a": claim_next(real_broker).claim}
    shown = {
        None: "waiting in worker", "prefilling": "prefilling",
        "preempted": "preempted", "decoding": "decoding",
    }  # fmt: skip
    for activity, word in shown.items():
        if activity:
            item = CommitItem(claims["a"], 0, (), "", activity=Activity(activity))
            real_broker.commit([item])
        code, text = quire("status", "a", "b")[:2]
        _, *rows = (line.split("  ") for line in text.splitlines())
        assert code == 0
        assert [[cell for cell in row if cell][1].strip() for row in rows] == [word, "queued"]
    real_broker.commit([make_item(claims["a"], 0, 2, final=True)])
    assert " completed " in quire("status", "a")[1]
    (record,) = records(quire("status", "b", "--json")[1])
    assert (record["request_id"], record["state"], record["activity"]) == ("b", "queued", None)


def test_status_of_an_unknown_request_fails_and_the_others_are_shown(quire, real_broker):
    real_broker.submit(make_request(id="a"))
    code, text, complaint = quire("status", "a", "ghost")
    assert code == 3 and "queued" in text and "ghost" in complaint
    assert quire("status", "ghost")[0] == 1


def test_what_was_cancelled_is_not_said_to_wait(quire, real_broker):
    def row():
        return row_of(quire("status")[1])

    def ages():
        (state,) = records(quire("status", "--json")[1])
        return [ingress["undelivered_seconds"] for ingress in state["ingress"]]

    real_broker.submit_many([make_request(id=name) for name in "ab"])
    pass_moment(real_broker)
    assert (row()["waiting"], max(ages()) > 0) == ("2", True)
    real_broker.cancel_many(["a", "b"])
    assert (row()["waiting"], max(ages())) == ("0", 0)


def test_status_tells_the_silent_from_the_living_and_leaves_out_the_long_gone(
    quire, real_broker, real_connection
):
    key = real_broker.keys.workers
    for name, seconds in (("now", 0), ("mute", 61), ("ended", 61), ("old", 601), ("older", 9999)):
        real_broker.beat_worker(name, "stopped" if name == "ended" else "ready", {})
        seen_ms, _, rest = real_connection.hget(key, name).partition(b" ")
        real_connection.hset(key, name, b"%d %s" % (int(seen_ms) - seconds * 1000, rest))
    text = quire("status")[1]
    *_, ended, mute, now, left_out = text.splitlines()
    assert [row.split()[:2] for row in (ended, mute, now)] == [
        ["ended", "stopped"], ["mute", "silent"], ["now", "ready"],
    ]  # fmt: skip
    assert left_out == "2 more, not seen for 10 minutes"
    (state,) = records(quire("status", "--json")[1])
    assert len(state["workers"]) == 5


def test_the_tenants_are_listed_where_there_are_several(quire, real_broker):
    real_broker.submit(make_request())
    assert "tenant" not in quire("top", "--count", "1")[1]
    real_broker.set_fairness(Fairness(by_tokens=True, weights={"gold": 3}))
    real_broker.set_limits(QueueLimits(rates={"gold": 6000}))
    body = {"prompt": [1, 2, 3], "max_tokens": 297}
    real_broker.submit_many([make_request(tenant="gold", body=body) for _ in range(2)])
    text = quire("top", "--count", "1")[1]
    lines = text.splitlines()
    assert "tenants take turns by tokens" in lines
    header = next(number for number, line in enumerate(lines) if "per_minute" in line)
    assert lines[header].split() == ["tenant", "open", "weight", "ahead", "per_minute", "left"]
    gold, default = lines[header + 1].split(), lines[header + 2].split()
    # It was lifted behind the request that was there before it was shared.
    assert gold[:3] == ["gold", "2", "3"] and gold[4] == "6000"
    assert 199 <= int(gold[3]) <= 201 and 5400 <= int(gold[5]) <= 5500
    assert default[:3] == ["default", "1", "1"] and default[4:] == ["-", "-"]
    (state,) = records(quire("status", "--json")[1])
    assert state["sharing"]["by_tokens"] is True
    assert [one["tenant"] for one in state["tenants"]] == ["gold", "default"]
    real_broker.submit_many([make_request(tenant=f"t{number}") for number in range(25)])
    assert "7 more tenants with fewer open requests" in quire("status")[1]


def test_status_of_a_turn_tells_what_it_waits_for(quire, real_broker):
    for name in "ab":
        assert quire("submit", "x", "--id", name, "--session", "s")[0] == 0
    (_, first, second) = quire("status", "a", "b")[1].splitlines()
    assert "queued" in first and "waits for" not in first
    assert "queued, waits for a" in second
    found = records(quire("status", "a", "b", "--json")[1])
    assert [one["waits_for"] for one in found] == [None, "a"]
    finish = make_item(claim_next(real_broker).claim, 0, 1, final=True)
    real_broker.commit([finish])
    assert "waits for" not in quire("status", "b")[1]


def test_a_column_of_shards_is_shown_where_there_are_several(quire):
    heads = ("waiting ", "priority ", "worker ")
    for flags, first in (((), ""), (("--shards", "2"), "shard  ")):
        lines = quire("status", *flags)[1].splitlines()
        assert all(any(line.startswith(first + head) for line in lines) for head in heads), lines


def test_what_workers_told_is_not_taken_for_what_runs_now(quire, real_broker):
    """All requests have ended since the last beat."""
    real_broker.beat_worker("w-1", "ready", {"decoding": 27})
    text = quire("status")[1]
    assert row_of(text)["running"] == "0"
    assert "27 decoding, as workers told up to 0." in text
