"""What `quire status` and `quire top` show of a queue."""

from quire.transitions.fairness import Fairness
from quire.transitions.values import QueueLimits
from tests.quire.builders import make_request, pass_moment
from tests.quire.cli.test_cli import records


def test_status_and_top_show_what_waits_and_who_works(quire, real_broker):
    real_broker.submit(make_request())
    real_broker.beat_worker("w-1", "ready", {"running": 2.0})
    (state,) = records(quire("status", "--json")[1])
    waiting = {row["priority"]: row["num_undelivered"] for row in state["ingress"]}
    assert waiting == {"low": 0, "normal": 1, "high": 0, "critical": 0}
    assert state["workers"][0]["load"] == {"running": 2.0}
    text = quire("status")[1]
    assert "w-1" in text and "running=2" in text
    assert "adapters" in text.splitlines()[-2] and " - " in text.splitlines()[-1]
    adapters = dict.fromkeys(("d", "c", "b", "a", "e"), "abc")
    real_broker.beat_worker("w-1", "ready", {"running": 2.0}, model="m", adapters=adapters)
    (state,) = records(quire("status", "--json")[1])
    assert state["workers"][0]["adapters"] == adapters
    assert "  m      a, b, c, d and 1 more  running=2" in quire("status")[1]
    assert len(records(quire("top", "--json", "--count", "2", "--interval", "0")[1])) == 2


def test_what_was_cancelled_is_not_said_to_wait(quire, real_broker):
    def row():
        header, cells = quire("status")[1].splitlines()[:2]
        return dict(zip(header.split(), cells.split(), strict=True))

    def ages():
        (state,) = records(quire("status", "--json")[1])
        return [ingress["undelivered_seconds"] for ingress in state["ingress"]]

    real_broker.submit_many([make_request(id=name) for name in "ab"])
    pass_moment(real_broker)
    assert (row()["queued"], max(ages()) > 0) == ("2", True)
    real_broker.cancel_many(["a", "b"])
    assert (row()["queued"], max(ages())) == ("0", 0)


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
    assert [row.split()[1:3] for row in (ended, mute, now)] == [
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
    assert "shard 0: tenants take turns by tokens" in text
    lines = text.splitlines()
    header = next(number for number, line in enumerate(lines) if "per_minute" in line)
    assert lines[header].split() == [
        "shard", "tenant", "open", "weight", "ahead", "per_minute", "left"
    ]  # fmt: skip
    gold, default = lines[header + 1].split(), lines[header + 2].split()
    # It was lifted behind the request that was there before it was shared.
    assert gold[:4] == ["0", "gold", "2", "3"] and gold[5] == "6000"
    assert 199 <= int(gold[4]) <= 201 and 5400 <= int(gold[6]) <= 5500
    assert default[:4] == ["0", "default", "1", "1"] and default[5:] == ["-", "-"]
    (state,) = records(quire("status", "--json")[1])
    assert state["sharing"]["by_tokens"] is True
    assert [one["tenant"] for one in state["tenants"]] == ["gold", "default"]
    real_broker.submit_many([make_request(tenant=f"t{number}") for number in range(25)])
    assert "7 more tenants with fewer open requests" in quire("status")[1]
