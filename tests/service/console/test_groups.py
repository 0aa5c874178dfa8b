"""Groups on the pages of a console: how they are found, what is shown of one, and their cancel."""

import re

import pytest

from quire.errors import UnknownRequest
from quire.queue.broker import Broker
from quire.records import State
from service.console.actions import ACTIONS, Fields
from service.console.reading import groups as reading
from service.console.reading.groups import group_of, groups_of
from service.console.reading.queue import QueueReading
from tests.quire.builders import claim_next, make_item, make_request
from tests.service.console.test_actions import Browser, notice_of
from tests.service.console.test_pages import text_of

NUM_SHARDS = 3


@pytest.fixture
def queue(fake):
    return QueueReading(fake.connection, "default")


@pytest.fixture
def sharded(fake):
    return QueueReading(fake.connection, "wide", shards=NUM_SHARDS)


def finish(broker, count: int) -> None:
    for _ in range(count):
        broker.commit([make_item(claim_next(broker).claim, 0, 1, final=True)])


def submit_wide(sharded, names) -> None:
    """Submits requests to the shards that their ids name."""
    for name in names:
        sharded.operator_of(name).submit(make_request(id=name))


def finish_wide(fake, count: int) -> None:
    for shard in range(NUM_SHARDS):
        broker = Broker(fake.connection, queue="wide", shard=shard)
        finish(broker, min(count, sum(broker.queue_depth().values())))


def ends_of(queue, group: str) -> list[str]:
    """The ids on all parts of the list of ends, in order."""
    before, found = None, []
    for _ in range(40):
        life = group_of(queue, group, before=before)
        found += [end.request_id for end in life.ends]
        if (before := life.older) is None:
            return found
    raise AssertionError("the list does not end")


def test_groups_that_run_wait_are_scheduled_or_have_ended_are_listed_open_ones_first(queue, fake):
    fake.broker.submit_many([make_request(id=f"done~{n}") for n in range(3)])
    finish(fake.broker, 3)
    fake.broker.submit(make_request(id="runs~a"))
    claim_next(fake.broker)
    fake.broker.submit(make_request(id="waits~a"))
    later = fake.broker.now_ms() + 60_000
    fake.broker.submit(make_request(id="later~a", not_before_ms=later))
    fake.broker.submit(make_request(id="alone"))
    found = groups_of(queue)
    assert [one.name for one in found.groups] == ["later", "runs", "waits", "done"]
    assert [(one.total, one.num_open, one.share) for one in found.groups][-1] == (3, 0, 1.0)
    assert found.num_searched == 7


def test_the_search_for_groups_reads_no_more_of_a_longer_queue(queue, fake, monkeypatch):
    monkeypatch.setattr(reading, "NUM_IDS", 2)
    monkeypatch.setattr(reading, "NUM_ENDS", 3)
    fake.broker.submit_many([make_request(id=f"g{n}~a") for n in range(9)])
    finish(fake.broker, 5)
    found = groups_of(queue)
    # The first and the last two that wait, and the last three that have ended.
    assert found.num_searched == 7
    assert {one.name for one in found.groups} == {"g5", "g6", "g7", "g8", "g2", "g3", "g4"}


def test_a_group_is_counted_over_all_shards_and_its_ends_are_in_order_of_time(sharded, fake):
    names = [f"wide~{n}" for n in range(40)]
    submit_wide(sharded, names)
    finish_wide(fake, 9)
    life = group_of(sharded, "wide", before=None)
    assert dict(life.state.counts) == {State.QUEUED: 13, State.COMPLETED: 27}
    times = [int(end.position.partition("-")[0]) for end in life.ends]
    assert times == sorted(times, reverse=True) and len(times) == 27
    assert {one.name for one in groups_of(sharded).groups} == {"wide"}
    assert len(life.open) == 13 and all(row.status is not None for row in life.open)


def test_all_ends_of_a_group_are_on_its_parts_each_once(sharded, fake, monkeypatch):
    monkeypatch.setattr(reading, "NUM_SHOWN_ENDS", 4)
    monkeypatch.setattr("service.console.reading.newest.LEAST_OF_SHARD", 2)
    submit_wide(sharded, [f"g~{n}" for n in range(30)])
    finish_wide(fake, 100)
    found = ends_of(sharded, "g")
    assert len(found) == 30 and set(found) == {f"g~{n}" for n in range(30)}


def test_ends_of_the_same_moment_in_several_shards_are_not_lost_between_two_parts(
    sharded, fake, monkeypatch
):
    monkeypatch.setattr(reading, "NUM_SHOWN_ENDS", 2)
    monkeypatch.setattr("service.console.reading.newest.LEAST_OF_SHARD", 1)
    submit_wide(sharded, ["g~a"])
    for shard, keys in enumerate(sharded.keys):
        for number in range(2):
            fields = {"id": f"g~{shard}.{number}", "state": "completed"}
            fake.connection.xadd(keys.of_group("g")[2], fields, id=f"7-{number}")
            fake.connection.pexpire(keys.of_group("g")[2], 60_000)
    assert ends_of(sharded, "g") == [
        f"g~{shard}.{number}" for number in (1, 0) for shard in (2, 1, 0)
    ]


def test_a_group_that_is_gone_is_not_found(queue, console):
    with pytest.raises(UnknownRequest):
        group_of(queue, "nothing", before=None)
    assert console.page("/groups/nothing").status == 404
    assert console.page("/groups/a%20b").status == 400
    assert console.page("/groups/g?before=x").status == 404


def test_the_page_of_a_group_shows_its_counts_its_open_requests_and_its_newest_ends(console, fake):
    fake.broker.submit_many([make_request(id=f"g~{n}") for n in range(4)])
    finish(fake.broker, 2)
    claim_next(fake.broker)
    shown = text_of(console.page("/groups/g").text)
    assert "2 of 4 requests have ended" in shown and "50 %" in shown
    assert "Waiting 1 Running 1 Completed 2 Failed 0" in shown and "Cancel the group" not in shown
    assert "g~2 waiting" in shown and "g~3 queued" in shown
    failed = "/queues/default/requests?state=ended&amp;status=failed&amp;group=g"
    assert f'<a href="{failed}">Failed</a>' in console.page("/groups/g").text
    assert "g~1 completed default" in shown
    listed = text_of(console.page("/groups").text)
    assert re.search(r"g 50 % 2 of 4 1 1 2 0 0 \d", listed), listed


def test_a_group_is_opened_by_its_name(console):
    reply = console.get("/find?queue=default&group=eval-7")
    assert (reply.status, reply.headers["Location"]) == (303, "/queues/default/groups/eval-7")
    reply = console.get("/find?queue=default&group=//evil.example/%0d%0aX:1")
    assert reply.headers["Location"].startswith("/queues/default/groups/%2F%2Fevil")


def test_a_group_is_cancelled_and_other_requests_are_not(start, fake):
    console = start(role="operator")
    fake.broker.submit_many([make_request(id=f"g~{n}") for n in range(4)])
    claim_next(fake.broker)
    fake.broker.submit(make_request(id="other~a"))
    browser = Browser(console)
    assert "Cancel the group" in console.page("/groups/g", **browser.headers).text
    reply = browser.send("cancel-group", ("group", "g"))
    assert notice_of(reply) == (
        "The cancel of 4 requests was accepted. 1 of them run: their workers end them at their "
        "next commit."
    )
    assert reply.headers["Location"] == "/queues/default/groups/g"
    assert fake.broker.group_counts("g") == {State.RUNNING: 1, State.CANCELLED: 3}
    assert fake.broker.status("other~a").state is State.QUEUED
    assert browser.send("cancel-group", ("group", "a b")).status == 400


def test_a_cancel_of_a_large_group_says_how_many_are_left(queue, fake, monkeypatch):
    monkeypatch.setattr("service.console.actions.MAX_CANCELLED", 3)
    fake.broker.submit_many([make_request(id=f"g~{n}") for n in range(5)])
    form = Fields([("group", "g")])
    assert "2 more are open" in ACTIONS["cancel-group"](queue, form).notice
    assert ACTIONS["cancel-group"](queue, form).notice == ("The cancel of 2 requests was accepted.")
