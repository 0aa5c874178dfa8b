"""What the pages of a console show, and that whatever a queue holds is shown as text."""

import html
import re
from dataclasses import replace

import pytest

from quire.batch.progress import BatchOptions, BatchProgress
from quire.batch.runs import RunTeller
from quire.testing.in_memory import FakeQuire
from quire.wire.codec import pack_own, unpack_map
from quire.wire.output import Activity
from service.console import views
from tests.console import stage
from tests.quire.builders import claim_next, make_request
from tests.service.builders import eventually
from tests.service.console.builders import ConsoleThread

PAGES = (
    *("", "/workers", "/dead", "/batches", "/limits", "/groups"),
    *(f"/groups/{name}" for name in (stage.GROUP, stage.NIGHTLY)),
    *("/requests", *(f"/requests?state={state}" for state in ("waiting", "scheduled", "ended"))),
    *(f"/requests/{name}" for name in (stage.RESUMED, stage.ENDED, "later-1")),
)


@pytest.fixture(scope="module")
def full():
    """A console of a queue with some of everything, which no test changes."""
    with FakeQuire() as fake:
        stage.play(fake.broker, num_waiting=52, num_running=50, num_ended=18)
        with ConsoleThread(fake.connection) as console:
            yield console


def text_of(page: str) -> str:
    """A page without its tags, with single spaces."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_shown_and_nothing_of_a_queue_is_taken_for_html(full, path):
    reply = full.page(path)
    assert reply.status == 200, text_of(reply.text)
    assert "<script>document" not in reply.text and "<img" not in reply.text
    assert "\u202e" not in reply.text and "\x1b" not in reply.text
    assert "1337" not in reply.text, "a template of the queue was run"


def test_pages_speak_of_finished_requests(full):
    searched = text_of(full.page("/requests?state=ended&tenant=nobody").text)
    assert re.search(r"Searched the newest \d+ finished requests", searched)
    # "Ends" is the word of the code: no page explains it.
    texts = {path: text_of(full.page(path).text) for path in PAGES}
    assert [path for path in PAGES if re.search(r"\bends\b", texts[path], re.IGNORECASE)] == []


def test_hostile_text_is_shown_as_it_is(full):
    shown = text_of(full.page(f"/requests/{stage.RESUMED}").text)
    assert "<script>document.title='owned'</script><img src=x" in shown
    assert "[U+202E] reversed \N{SYMBOL FOR ESCAPE}[31m red & \"quoted\" 'too'" in shown
    assert "{{ 7 * 191 }}" in shown


def test_an_environment_without_escapes_would_be_noticed(monkeypatch):
    make = views.Environment.__init__
    without = lambda self, **options: make(self, **options | {"autoescape": False})  # noqa: E731
    monkeypatch.setattr(views.Environment, "__init__", without)
    text = views.Views()._environment.from_string("{{ x | shown }}").render(x=stage.HOSTILE)
    assert "<script>document" in text


def test_the_overview_counts_what_waits_runs_and_is_dead(full):
    shown = text_of(full.page().text)
    assert "Waiting 52 " in shown and "Running 52 " in shown
    assert "Dead letters 3 " in shown and "Scheduled 3 " in shown
    assert "Workers 3 alive" in shown or "Workers 4 alive" in shown
    assert "critical 13 " in shown and "acme " in shown
    assert "adaptive, aging 30000 ms" in shown


def test_a_paused_queue_says_why_on_every_look(console, fake):
    fake.broker.pause("<b>repairs</b>")
    page = console.page().text
    assert "This queue is paused." in page and "&lt;b&gt;repairs&lt;/b&gt;" in page


def test_the_running_requests_are_listed_by_their_first_claim_a_page_at_a_time(full):
    first, second = (full.page(f"/requests{part}").text for part in ("", "?offset=50"))
    named = re.findall(r'class="id" href="/queues/default/requests/([^"]+)"', first + second)
    assert len(named) == len(set(named)) == 52
    assert set(named[:2]) == {"report~resumed", "report~running"}
    assert "and bound into" in text_of(first)
    assert "1 to 50 of 52" in text_of(first) and "51 to 52 of 52" in text_of(second)


def test_the_waiting_requests_are_listed_as_they_are_due_most_urgent_first(full):
    pages = [full.page(f"/requests?state=waiting{part}").text for part in ("", "&offset=50")]
    classes = re.findall(r"<td>(low|normal|high|critical)</td>", "".join(pages))
    assert len(classes) == 52
    assert classes == sorted(classes, key=["critical", "high", "normal", "low"].index)


def test_the_life_of_a_resumed_request_names_its_epochs_and_tokens(full):
    shown = text_of(full.page(f"/requests/{stage.RESUMED}").text)
    for part in ("Submitted", "First claim", "First token, epoch 1 tokens 0 to 29",
                 "Resumed after token 29, epoch 3 tokens 30 to 70", "Decoding"):  # fmt: skip
        assert part in shown, part


def test_the_life_of_an_ended_request_says_how_it_ended_and_that_it_was_preempted(full):
    shown = text_of(full.page(f"/requests/{stage.ENDED}").text)
    assert "Preempted 2 times for 0.40 s in the last claim, 1 of them by swap" in shown
    assert "Completed eos, 25 tokens" in shown and "22.5 tokens/s" in shown
    assert "16 of the prefix cache" in shown
    assert "were deleted when the request ended" in shown


def test_an_open_page_gets_the_text_of_its_request_as_it_grows(console, fake):
    fake.broker.submit(make_request(id="a"))
    claim = claim_next(fake.broker).claim
    fake.broker.commit([stage.item(claim, 0, ["one ", "two "])])
    with console.following("/queues/default/requests/a?seen=2") as events:
        fake.broker.commit([stage.item(claim, 2, [stage.HOSTILE])])
        found = next(event for event in events if '"text"' in event.data)
        assert (found.id, found.body["text"]) == ("3", views.shown(stage.HOSTILE))
        fake.broker.commit([stage.item(claim, 3, [], end=stage.completed("a"))])
        next(event for event in events if "Completed" in event.data)


def test_a_page_that_comes_back_gets_the_rest(console, fake):
    fake.broker.submit(make_request(id="a"))
    claim = claim_next(fake.broker).claim
    fake.broker.commit([stage.item(claim, 0, ["one ", "two ", "three"])])
    with console.following("/queues/default/requests/a?seen=0", Last_Event_ID="2") as events:
        found = next(event for event in events if '"text"' in event.data)
        assert (found.id, found.body["text"]) == ("3", "three")


def test_a_page_whose_log_was_rewritten_begins_again(console, fake):
    fake.broker.submit(make_request(id="a"))
    claim = claim_next(fake.broker).claim
    fake.broker.commit([stage.item(claim, 0, ["one "])])
    with console.following("/queues/default/requests/a?seen=5") as events:
        text = next(event for event in events if '"text"' in event.data)
        assert (text.id, text.body["text"]) == ("1", "one ")


def test_an_open_page_gets_a_part_only_when_it_changes(console, fake):
    fake.broker.beat_worker("w", "ready", {}, model="m")
    with console.following("/queues/default/requests?state=waiting") as events:
        assert "No request is waiting" in next(events).body["html"]
        fake.broker.submit(make_request(id="a"))
        assert "/requests/a" in next(events).body["html"]


def test_an_outage_is_told_and_its_end_too(console, fake):
    with console.following("/queues/default/requests?state=scheduled") as events:
        next(events)
        with fake.outage():
            assert "Redis" in next(event for event in events if '"text"' in event.data).body["text"]
            assert console.page().status == 503
        eventually(lambda: console.page().status == 200)


def test_more_open_pages_than_allowed_are_refused(start, fake):
    console = start(max_streams=1)
    with console.following("/queues/default/workers") as events:
        next(events)
        assert console.page("/workers", Accept="text/event-stream").status == 503
        assert console.page("/workers").status == 200


@pytest.mark.parametrize("path", ["/requests/nobody", "/requests/a%20b", "/requests?state=lost",
    "/requests?offset=-1", "/requests?offset=99999999999", "/requests?shard=1",
    "/requests?state=ended&before=x", "/nothing", "/requests?offset=%C2%B2"])  # fmt: skip
def test_what_is_not_there_is_not_found(console, path):
    assert console.page(path).status == 404


def test_another_queue_is_not_shown(start, fake):
    console = start(queues="default,bulk")
    assert console.get("/queues/bulk").status == 200
    assert console.get("/queues/other").status == 404
    shown = text_of(console.get("/").text)
    assert "default open 0 0" in shown and "bulk open 0 0" in shown


def test_a_request_is_found_by_its_id(console):
    reply = console.get("/find?queue=default&id=report~1")
    assert (reply.status, reply.headers["Location"]) == (303, "/queues/default/requests/report~1")
    reply = console.get("/find?queue=default&id=//evil.example/%0d%0aX:1")
    assert reply.headers["Location"].startswith("/queues/default/requests/%2F%2Fevil")


def test_a_worker_is_shown_with_what_it_does(console, fake):
    load = {"claims": 5.0, "decoding": 3.0, "kv_usage": 0.25}
    fake.broker.beat_worker("w", "ready", load, model="m", adapters={"polite": "x"})
    shown = text_of(console.page("/workers").text)
    assert re.search(r"w ready m polite 5 0 3 0 25 %", shown), shown


def test_what_workers_claim_is_counted_by_activity(console, fake):
    fake.broker.beat_worker("w", "ready", {str(Activity.DECODING): 7.0})
    assert "decoding 7" in text_of(console.page().text)


def test_probes_need_no_page(console, fake):
    assert console.get("/livez").body == {"ok": True}
    assert console.get("/readyz").status == 200
    with fake.outage():
        assert (console.get("/livez").status, console.get("/readyz").status) == (200, 503)


def test_times_name_their_zone(full):
    assert str(views.moment(1_700_000_000_123)).endswith(">22:13:20.123 UTC</time>")
    assert str(views.dated(1_700_000_000_123)).endswith(">2023-11-14 22:13:20 UTC</time>")
    assert views.dated(1e300) == views.moment(None) == views.NOTHING
    for path in ("/requests?state=ended", f"/requests/{stage.ENDED}", "/batches"):
        assert re.search(r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3})? UTC", full.page(path).text), path


def test_runs_of_batch_files_are_listed_and_one_without_a_word_is_silent(console, fake, tmp_path):
    progress = BatchProgress(total=40, completed=9, failed=1, inflight=5, tokens=700)
    for name, ending in (("goes-on", None), ("stopped", "cancelled"), ("killed", None)):
        teller = RunTeller(fake.broker, tmp_path / name, BatchOptions(name=name), name=name)
        teller.tell(replace(progress, ending=ending))
    key, later = fake.broker.keys.runs, fake.broker.now_ms() - 60_000
    for run_id, data in fake.connection.hgetall(key).items():
        word = unpack_map(data)
        if word["name"] != "goes-on":
            fake.connection.hset(key, run_id, pack_own({**word, "told_ms": later}))
    shown = text_of(console.page("/batches").text)
    assert re.search(r"goes-on on \S+ running default 25 % 10 of 40, 1 failed 5 700 ", shown), shown
    assert re.search(r"killed on \S+ silent default 25 % 10 of 40, 1 failed 5 700 ", shown)
    assert re.search(r"stopped on \S+ cancelled default 25 % 10 of 40, 1 failed 0 700 ", shown)
