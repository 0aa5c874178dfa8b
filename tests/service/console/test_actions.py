"""What operators may do with a console, and who may not."""

import re
from urllib.parse import unquote, urlencode

import pytest

from quire.queue.control.limits import QueueLimits
from quire.queue.rank.fairness import Fairness
from quire.transport.connection import connect
from quire.wire.output import State
from service.console.actions import ACTIONS
from tests.console import stage
from tests.quire.builders import claim_next, make_request
from tests.service.builders import private_redis
from tests.service.console.builders import ConsoleThread
from tests.service.gateway.front import Reply

PASSWORD, OTHER = "a-long-password-1", "another-password-2"


class Browser:
    """A browser that has opened a page of the queue, with its cookie and the token of its forms."""

    def __init__(self, console: ConsoleThread, **headers: str) -> None:
        self._console = console
        self.headers = headers
        reply = console.page(**headers)
        self.headers["Cookie"] = reply.headers["Set-Cookie"].partition(";")[0]
        found = re.search(r'name="token" value="([0-9a-f]+)"', reply.text)
        self.token = found[1] if found else ""

    def send(self, action: str, *fields: tuple[str, str], **headers: str) -> Reply:
        """Sends a form of a page."""
        body = urlencode([("token", self.token), *fields])
        return self.post(action, body, **headers)

    def post(self, action: str, body: str, **headers: str) -> Reply:
        kind = "application/x-www-form-urlencoded"
        return self._console.ask(
            "POST",
            f"/queues/default/actions/{action}",
            body,
            **{"Content_Type": kind, **self.headers, **headers},
        )


@pytest.fixture
def console(start):
    return start(role="operator")


@pytest.fixture
def browser(console):
    return Browser(console)


def notice_of(reply: Reply) -> str:
    """What the next page will say."""
    assert reply.status == 303, reply.text
    return unquote(re.search(r"quire_console_notice=([^;]*)", reply.headers["Set-Cookie"])[1])


def test_a_queue_is_paused_and_resumed(browser, fake):
    reply = browser.send("pause", ("reason", "repairs <b>"))
    assert notice_of(reply).startswith("The queue is paused.")
    assert reply.headers["Location"] == "/queues/default"
    assert fake.broker.pause_reason() == "repairs <b>"
    browser.send("resume")
    assert fake.broker.pause_reason() is None


def test_the_next_page_says_what_was_done_once(browser, console):
    sent = browser.send("pause", ("reason", ""))
    cookie = sent.headers["Set-Cookie"].partition(";")[0]
    page = console.page(Cookie=f"{browser.headers['Cookie']}; {cookie}")
    assert "The queue is paused. Running requests continue.</p>" in page.text
    assert 'quire_console_notice=""' in str(page.headers)


def test_a_request_is_cancelled(browser, fake):
    fake.broker.submit(make_request(id="g~a"))
    reply = browser.send("cancel", ("request", "g~a"))
    assert (notice_of(reply), reply.headers["Location"]) == (
        "The cancel was accepted. It is cancelled.",
        "/queues/default/requests/g~a",
    )
    assert fake.broker.status("g~a").state is State.CANCELLED
    assert browser.send("cancel", ("request", "nobody")).status == 404


def test_a_worker_is_asked_to_drain(browser, fake, console):
    fake.broker.beat_worker("w", "ready", {})
    assert "was asked to drain" in notice_of(browser.send("drain", ("worker", "w")))
    assert fake.broker.control().drain_wishes == {"w"}
    assert "drain asked" in console.page("/workers").text
    assert browser.send("drain", ("worker", "x")).status == 400


def test_dead_letters_are_queued_again_with_or_without_tokens_or_deleted(browser, fake, console):
    for name in "abc":
        fake.broker.submit(make_request(id=name))
        claim = claim_next(fake.broker).claim
        fake.broker.commit([stage.item(claim, 0, ["one ", "two "])])
        fake.broker.dead_letter(claim, "tired")
    letters = {one.request_id: f"0:{one.entry_id}" for one in fake.broker.dead_letters()}
    page = console.page("/dead").text
    assert all(f'value="{value}"' in page for value in letters.values())
    reply = browser.send("requeue", ("letter", letters["a"]), ("keep", "1"))
    assert notice_of(reply) == "Queued again: 1 of 1."
    assert fake.broker.status("a").published == 2
    both = [("letter", letters[name]) for name in "ab"]
    assert notice_of(browser.send("requeue", *both)) == (
        "Queued again: 1 of 2. The others are gone."
    )
    assert fake.broker.status("b").published == 0
    assert notice_of(browser.send("purge", ("letter", letters["c"]))) == "Deleted letters: 1."
    assert fake.broker.dead_letters() == []
    assert fake.broker.status("c").state is State.FAILED


def test_limits_are_set_and_an_empty_field_removes_one(browser, fake, console):
    fake.broker.set_limits(QueueLimits(tokens=5, tenants={"a": 3}))
    form = {"requests": "100", "tokens": "", "per_tenant": "7", "rate": "6000",
            "fairness": "tokens", "request_timeout": "1.5", "target_latency": "0",
            "max_tokens": "4096", "ends": "500", "prompts": "65536"}  # fmt: skip
    assert browser.send("limits", *form.items()).status == 303
    assert fake.broker.control().limits == QueueLimits(
        requests=100, per_tenant=7, rate=6000, tenants={"a": 3}
    )
    assert fake.broker.control().fairness.by_tokens and fake.broker.control().ends_kept == 500
    defaults = fake.broker.control().defaults
    assert (defaults.request_timeout_seconds, defaults.target_latency_seconds) == (1.5, None)
    assert defaults.max_tokens == 4096
    assert fake.broker.control().prompts_kept == 65_536
    page = console.page("/limits").text
    assert 'value="4096"' in page and 'name="prompts" value="65536"' in page
    assert "up to 64.0 KiB" in page
    assert browser.send("limits", *(form | {"prompts": str(2 << 20)}).items()).status == 400
    assert browser.send("limits", *(form | {"max_tokens": str(1 << 40)}).items()).status == 400
    browser.send("limits", *(form | {"max_tokens": ""}).items())
    assert fake.broker.control().defaults.max_tokens is None


def test_the_limits_of_one_tenant_are_set_and_removed(browser, fake, console):
    fields = {"tenant": "gold", "limit": "0", "tenant_rate": "9", "weight": "3"}
    browser.send("tenant", *fields.items())
    assert fake.broker.control().limits == QueueLimits(tenants={"gold": 0}, rates={"gold": 9})
    assert fake.broker.control().fairness == Fairness(weights={"gold": 3})
    page = re.sub(r"<[^>]*>", " ", console.page("/limits").text)
    assert re.search(r"gold\s+0\s+none\s+9\s+3", page), page
    browser.send("tenant", ("tenant", "gold"))
    assert (
        fake.broker.control().limits == QueueLimits()
        and fake.broker.control().fairness == Fairness()
    )


@pytest.mark.parametrize(("action", "fields"), [
    ("limits", {"requests": "-1", "fairness": "none"}), ("limits", {"fairness": "x"}),
    ("limits", {"requests": "1e9", "fairness": "none"}), ("limits", {}),
    ("limits", {"request_timeout": "nan", "fairness": "none"}),
    ("limits", {"requests": "\N{SUPERSCRIPT TWO}", "fairness": "none"}),
    ("tenant", {"tenant": "a b"}), ("tenant", {"tenant": "a", "weight": "0"}),
    ("requeue", {}), ("requeue", {"letter": "0:x"}), ("purge", {"letter": "9:1-1"}),
    ("cancel-batch", {"batch": "x"}),
])  # fmt: skip
def test_a_wrong_field_is_named_and_changes_nothing(browser, fake, action, fields):
    reply = browser.send(action, *fields.items())
    assert reply.status == 400
    assert fake.connection.hgetall(fake.broker.keys.control) == {}


# Who may not.


@pytest.mark.parametrize("action", ACTIONS)
def test_an_observers_console_changes_nothing_and_has_no_forms(start, fake, action):
    browser = Browser(start())
    assert browser.token == ""
    assert browser.send(action, ("letter", "0:1-1"), ("worker", "w")).status == 403


@pytest.mark.parametrize("action", ACTIONS)
def test_a_form_without_its_token_is_refused(browser, fake, action):
    fake.broker.beat_worker("w", "ready", {})
    for body in ("worker=w", "token=&worker=w", f"token={'0' * 64}&worker=w"):
        reply = browser.post(action, body)
        assert reply.status == 403 and "too old" in reply.text
    assert fake.connection.hgetall(fake.broker.keys.control) == {}


def test_a_token_is_good_for_its_own_browser_alone(browser, console, fake):
    other = Browser(console)
    assert other.token != browser.token
    other.token = browser.token
    assert other.send("pause").status == 403
    browser.headers.pop("Cookie")
    assert browser.send("pause").status == 403
    assert fake.broker.pause_reason() is None


@pytest.mark.parametrize("headers", [
    {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"}, {"Origin": "http://127.0.0.1:1"},
])  # fmt: skip
def test_a_form_of_another_site_is_refused_even_with_a_token(browser, fake, headers):
    assert browser.send("pause", **headers).status == 403
    assert fake.broker.pause_reason() is None


def test_a_form_of_our_own_site_is_taken(browser, console):
    headers = {"Origin": f"http://127.0.0.1:{console.port}", "Sec_Fetch_Site": "same-origin"}
    assert browser.send("pause", **headers).status == 303


def test_a_user_of_the_file_who_is_no_operator_changes_nothing(start, fake, tmp_path):
    path = tmp_path / "users"
    path.write_text(f"ann {PASSWORD} operator\nbob {OTHER}\n")
    console = start(role="operator", users_file=path)
    bob = Browser(console, Authorization=f"Bearer {OTHER}")
    assert bob.send("pause").status == 403 and bob.token == ""
    ann = Browser(console, Authorization=f"Bearer {PASSWORD}")
    assert ann.send("pause").status == 303
    ann.headers["Authorization"] = f"Bearer {OTHER}"
    assert ann.send("resume").status == 403
    assert fake.broker.pause_reason() == ""


def test_what_is_no_form_of_ours_is_refused(browser, console, fake):
    assert browser.send("nothing").status == 404
    assert browser.post("pause", "{}", Content_Type="application/json").status == 415
    assert browser.post("pause", "%ff=%ff").status == 400
    assert browser.post("pause", "&".join(f"a{n}=1" for n in range(300))).status == 400
    assert browser.post("pause", f"token={browser.token}&reason={'x' * 40_000}").status == 413
    for method in ("GET", "PUT", "DELETE"):
        assert console.ask(method, "/queues/default/actions/pause").status in (404, 405)
    assert fake.broker.pause_reason() is None


def test_an_action_that_redis_refuses_says_so(browser, fake):
    with fake.outage():
        reply = browser.send("pause")
    assert reply.status == 503 and "Redis" in reply.text


def test_an_action_for_which_redis_has_no_memory_says_so():
    with (
        private_redis() as server,
        connect(server.url) as connection,
        ConsoleThread(connection, role="operator") as console,
    ):
        browser = Browser(console)
        connection.config_set("maxmemory", 1)
        reply = browser.send("pause")
        assert reply.status == 503 and "no memory" in reply.text


def test_actions_are_logged_with_their_user(browser, caplog):
    browser.send("pause", ("reason", "r"))
    assert any("an operator has acted" in str(record.msg) for record in caplog.records)
