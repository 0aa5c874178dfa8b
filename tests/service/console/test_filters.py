"""The filters of the lists: what they find, how far they search, and hostile addresses."""

import html
import re
from datetime import UTC, datetime
from urllib.parse import quote

import pytest

from quire.queue.broker import Broker
from quire.records import ErrorInfo
from service.console.filters import FIELDS, form_of
from service.console.reading import ends as ends_reading
from service.console.reading import letters as letters_reading
from service.console.reading import lists
from service.console.reading.ends import ended
from service.console.reading.filters import EVERYTHING, Filter
from service.console.reading.letters import letters_of
from service.console.reading.queue import QueueReading
from tests.console import stage
from tests.quire.builders import claim_next, make_request
from tests.service.builders import eventually
from tests.service.console.test_pages import text_of

NUM_SHARDS = 3
HOUR_MS = 3_600_000


def end(broker, name: str, *, error: ErrorInfo | None = None, **changes) -> None:
    """A request that has ended, as a model named abacus does it."""
    broker.submit(make_request(id=name, **changes))
    claim = claim_next(broker).claim
    broker.commit([stage.item(claim, 0, ["x"], end=stage.completed(name, error=error))])


def ids_on(page: str) -> list[str]:
    """The requests that a page lists, in order."""
    return re.findall(
        r'<th scope="row"><a class="id" href="/queues/default/requests/([^"]+)"', page
    )


def iso(at_ms: float) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@pytest.fixture
def ends(fake):
    """Ends of two tenants: two failed, one of them long ago, and one of a group."""
    device, full = ErrorInfo("device_failed", "the GPU fell off"), ErrorInfo("out_of_memory", "no")
    end(fake.broker, "fine", tenant="acme")
    end(fake.broker, "eval~1", tenant="acme")
    end(fake.broker, "eval~2", tenant="globex", error=device)
    end(fake.broker, "full", tenant="globex", error=full)
    return fake.broker


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["full", "eval~2", "eval~1", "fine"]),
        ("&status=failed", ["full", "eval~2"]),
        ("&tenant=acme", ["eval~1", "fine"]),
        ("&group=eval", ["eval~2", "eval~1"]),
        ("&error=DEVICE", ["eval~2"]),
        ("&error=fell+off", ["eval~2"]),
        ("&model=ABA", ["full", "eval~2", "eval~1", "fine"]),
        ("&model=llama", []),
        ("&within=1h", ["full", "eval~2", "eval~1", "fine"]),
        ("&until=2020-01-01T00:00", []),
        ("&status=failed&group=eval&tenant=globex&since=2020-01-01T00:00Z", ["eval~2"]),
    ],
)
def test_ends_are_found_by_state_tenant_group_error_model_and_time(ends, console, query, names):
    page = console.page(f"/requests?state=ended{query}").text
    assert ids_on(page) == names
    assert ("Searched the newest" in page) == bool(query)


def test_ends_are_found_between_two_times(ends, fake, console):
    moved = fake.connection.xrevrange(ends.keys.ends)
    fake.connection.delete(ends.keys.ends)
    now = ends.now_ms()
    for number, (_, fields) in enumerate(reversed(moved)):
        fake.connection.xadd(ends.keys.ends, fields, id=f"{now - (3 - number) * HOUR_MS}-0")
    between = f"&since={iso(now - 2.5 * HOUR_MS)}&until={iso(now - 0.5 * HOUR_MS)}"
    assert ids_on(console.page(f"/requests?state=ended{between}").text) == ["eval~2", "eval~1"]
    assert ids_on(console.page("/requests?state=ended&within=1h").text) == ["full"]
    assert ids_on(console.page("/requests?state=ended&within=24h").text)[-1] == "fine"


def test_a_search_of_ends_is_bounded_and_the_next_one_goes_on(fake, monkeypatch):
    monkeypatch.setattr(ends_reading, "NUM_SEARCHED", 4)
    for number in range(10):
        end(fake.broker, f"r{number}", tenant="rare" if number in (0, 7) else "often")
    queue, wanted = QueueReading(fake.connection, "default"), Filter(tenant="rare")
    first = ended(queue, before=None, wanted=wanted)
    assert ([one.request_id for one in first.ends], first.num_searched) == (["r7"], 4)
    second = ended(queue, before=first.older, wanted=wanted)
    assert (second.ends, second.num_searched) == ([], 4)
    third = ended(queue, before=second.older, wanted=wanted)
    assert ([one.request_id for one in third.ends], third.older) == (["r0"], None)


def test_the_ends_of_all_shards_are_one_list(fake, start):
    for number in range(NUM_SHARDS):
        for name in ("a", "b"):
            end(Broker(fake.connection, shard=number), f"{name}{number}")
    console = start(shards=NUM_SHARDS)
    names = [f"{name}{number}" for number in (2, 1, 0) for name in ("b", "a")]
    assert ids_on(console.page("/requests?state=ended").text) == names
    assert ids_on(console.page().text) == names


def test_waiting_requests_are_found_by_tenant_group_and_time(fake, console):
    broker = fake.broker
    broker.submit_many([make_request(id=f"eval~{n}", tenant="acme") for n in range(2)])
    broker.submit_many([make_request(id="eval~x"), make_request(id="b", tenant="acme")])
    broker.connection.hincrby(broker.keys.request("b"), "submitted_ms", -2 * HOUR_MS)

    def found(query: str) -> set[str]:
        return set(ids_on(console.page(f"/requests?state=waiting{query}").text))

    assert found("&tenant=acme") == {"eval~0", "eval~1", "b"}
    assert found("&group=eval") == {"eval~0", "eval~1", "eval~x"}
    assert found("&group=eval&tenant=default") == {"eval~x"}
    assert found("&tenant=acme&within=1h") == {"eval~0", "eval~1"}
    assert found(f"&until={iso(broker.now_ms() - HOUR_MS)}") == {"b"}


def test_a_search_of_waiting_requests_is_bounded_and_the_next_one_goes_on(
    fake, console, monkeypatch
):
    monkeypatch.setattr(lists, "NUM_SEARCHED", 4)
    fake.broker.submit_many(
        [make_request(id=f"r{n}", tenant="rare" if n in (0, 9) else "often") for n in range(10)]
    )
    page = console.page("/requests?state=waiting&tenant=rare").text
    assert ids_on(page) == ["r0"] and "Searched 4 of 10 waiting requests." in text_of(page)
    seen = []
    while (following := re.search(r'href="/queues/default([^"]*)" rel="next"', page)) is not None:
        page = console.page(html.unescape(following[1])).text
        seen.append(ids_on(page))
    assert seen == [[], ["r9"]]
    assert "from the 9th on" in text_of(page) and "First" in page


def test_running_requests_are_found_by_activity_tenant_and_the_model_of_their_worker(fake, console):
    broker = fake.broker
    for name, worker, tenant in (("a", "w1", "acme"), ("b", "w2", "acme"), ("c", "w2", "globex")):
        broker.submit(make_request(id=name, tenant=tenant))
        (claimed,) = broker.claim(broker.peek(count=1), worker=worker)
        if name != "a":
            broker.commit([stage.item(claimed.claim, 0, ["x"])])
    for worker, model in (("w1", "abacus"), ("w2", "SmolLM2-135M")):
        broker.beat_worker(worker, "ready", {}, model=model)

    def found(query: str) -> list[str]:
        return ids_on(console.page(f"/requests?state=running{query}").text)

    assert found("&tenant=acme") == ["a", "b"]
    assert found("&status=decoding") == ["b", "c"]
    assert found("&model=smollm2") == ["b", "c"]
    assert found("&model=smollm2&tenant=acme&within=15m") == ["b"]
    assert found("&until=2020-01-01T00:00") == []
    assert "Searched 3 running requests." in text_of(
        console.page("/requests?state=running&tenant=acme").text
    )


def test_scheduled_requests_are_found_by_tenant(fake, console):
    later = fake.broker.now_ms() + HOUR_MS
    fake.broker.submit_many(
        [make_request(id=name, tenant=name, not_before_ms=later) for name in ("acme", "globex")]
    )
    assert ids_on(console.page("/requests?state=scheduled&tenant=acme").text) == ["acme"]


def test_dead_letters_are_found_by_tenant_group_reason_and_time(fake, console):
    for name, reason, tenant in (("g~a", "Five claims", "acme"), ("b", "no body", "globex")):
        fake.broker.submit(make_request(id=name, tenant=tenant))
        fake.broker.dead_letter(claim_next(fake.broker).claim, reason)

    def found(query: str) -> list[str]:
        return ids_on(console.page(f"/dead?{query}").text)

    assert found("") == ["b", "g~a"]
    assert found("tenant=acme") == found("group=g") == found("error=five") == ["g~a"]
    assert found("within=15m") == ["b", "g~a"] and found("until=2020-01-01T00:00") == []


def test_a_search_of_dead_letters_is_bounded_and_the_next_one_goes_on(fake, monkeypatch):
    monkeypatch.setattr(letters_reading, "NUM_SEARCHED", 7)
    monkeypatch.setattr(letters_reading, "PAGE_SIZE", 2)
    for number in range(18):
        tenant = "rare" if number in (0, 1, 2, 17) else "often"
        fake.broker.submit(make_request(id=f"r{number}", tenant=tenant))
        fake.broker.dead_letter(claim_next(fake.broker).claim, "tired")
    before, parts = None, []
    for _ in range(6):
        page = letters_of(fake.broker, before=before, wanted=Filter(tenant="rare"))
        parts.append(([one.letter.request_id for one in page.letters], page.num_searched))
        if (before := page.older) is None:
            break
    assert parts == [(["r17"], 7), ([], 7), (["r2", "r1"], 3), (["r0"], 1)]


def test_the_form_has_the_filter_and_links_of_the_page_keep_it(ends, console):
    page = console.page("/requests?state=ended&status=failed&tenant=globex&within=1h").text
    assert (
        '<option value="failed" selected>' in page
        and 'name="tenant" type="text" value="globex"' in page
    )
    assert "Only: failed, tenant globex, ended within 1h." in text_of(page)
    tabs = re.findall(r'href="([^"]*)"[^>]*>(Running|Waiting|Ended)<', page)
    assert [html.unescape(address).partition("?")[2] for address, _ in tabs] == [
        "state=running&tenant=globex&within=1h",
        "state=waiting&tenant=globex&within=1h",
        "state=ended&status=failed&tenant=globex&within=1h",
    ]
    assert 'href="/queues/default/requests?state=ended">Remove the filter' in page


def test_empty_fields_of_a_form_leave_the_address(console):
    reply = console.page("/requests?state=ended&status=&tenant=acme&error=a%26b&since=")
    assert reply.status == 303
    assert reply.headers["Location"] == (
        "/queues/default/requests?state=ended&tenant=acme&error=a%26b"
    )


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("state=ended&status=lost", "status: must be one of completed, failed"),
        ("state=running&status=failed", "status: must be one of waiting, prefilling"),
        ("state=waiting&model=x", "model: the list of waiting requests has no such filter"),
        ("state=ended&within=2h", "within: must be one of 15m, 1h, 6h, 24h"),
        ("state=ended&since=yesterday", "since: must be a time in UTC such as"),
        ("state=ended&until=2026-13-01T00:00", "until: must be a time in UTC such as"),
        ("state=ended&until=0000-01-01T00:00", "until: must be a time in UTC such as"),
        ("state=ended&tenant=a%20b", "tenant: is not the name of a tenant"),
        ("state=ended&group=a~b", "group: must match"),
        ("state=ended&error=a%00b", "error: must be printable"),
        (f"state=ended&error={'x' * 129}", "error: must be printable, with at most 128"),
    ],
)
def test_a_filter_that_cannot_be_is_refused_by_its_name(console, query, says):
    reply = console.page(f"/requests?{query}")
    assert reply.status == 400 and says in text_of(reply.text)


@pytest.mark.parametrize("of", FIELDS)
def test_hostile_text_in_an_address_is_shown_as_text(console, of):
    name = "error" if "error" in FIELDS[of] else "model"
    if name not in FIELDS[of]:
        assert form_of(EVERYTHING, of=of).query == ""
        return
    hostile = "\"><script>document.title='owned'</script><img src=x>{{7*191}}"
    path = "/dead?" if of == "dead" else f"/requests?state={of}&"
    page = console.page(f"{path}{name}={quote(hostile)}").text
    assert "<script>document" not in page and "<img" not in page and "1337" not in page
    assert hostile in text_of(page)


def test_old_times_and_times_far_ahead_find_nothing_and_break_nothing(console):
    for query in ("since=9999-12-31T23:59", "until=0001-01-01T00:00", "until=1960-01-01T00:00"):
        assert console.page(f"/requests?state=ended&{query}").status == 200


def test_the_overview_counts_the_failures_of_the_last_hour_and_leads_to_them(ends, start):
    console = start()

    def shown() -> str:
        return console.page().text

    eventually(lambda: "Completed, last hour 2 Failed, last hour 2" in text_of(shown()))
    (address,) = re.findall(r'href="/queues/default([^"]*)">Failed, last hour', shown())
    assert ids_on(console.page(html.unescape(address)).text) == ["full", "eval~2"]
