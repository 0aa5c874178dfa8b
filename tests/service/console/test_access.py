"""Who may use a console, and what a browser may do with its pages."""

import base64

import pytest

from service.console.access import Users
from service.console.settings import ConsoleSettings
from service.shared.settings.sources import ConfigurationError

PASSWORD, OTHER = "a-long-password-1", "another-password-2"


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "users"
    path.write_text(f"# people\nann {PASSWORD} operator\nbob {OTHER}\n")
    return path


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize(("authorization", "status"), [
    (None, 401), ("", 401), ("Basic !", 401), ("Bearer x", 401), (basic("ann", OTHER), 401),
    (basic("bob", PASSWORD), 401), (basic("", PASSWORD), 401), (basic("ann", PASSWORD), 200),
    (basic("bob", OTHER), 200), (f"Bearer {OTHER}", 200), (f"bearer {PASSWORD}", 200),
])  # fmt: skip
def test_with_a_file_of_users_a_password_is_needed(start, users_file, authorization, status):
    console = start(users_file=users_file)
    headers = {} if authorization is None else {"Authorization": authorization}
    reply = console.page(**headers)
    assert reply.status == status
    assert ("WWW-Authenticate" in reply.headers) is (status == 401)
    assert console.get("/livez").status == 200


def test_the_page_says_who_is_there_and_what_they_may_do(start, users_file):
    console = start(users_file=users_file, role="operator")
    assert "ann · operator" in console.page(Authorization=basic("ann", PASSWORD)).text
    assert "bob · read only" in console.page(Authorization=basic("bob", OTHER)).text


def test_an_observers_console_has_no_operators(start, users_file):
    console = start(users_file=users_file)
    assert "ann · read only" in console.page(Authorization=basic("ann", PASSWORD)).text


@pytest.mark.parametrize("line", ["ann", "ann short operator", f"ann {PASSWORD} admin",
    f"a:b {PASSWORD}", f"ann {PASSWORD}\nbob {PASSWORD}", f"ann p\u00e4{PASSWORD}"])  # fmt: skip
def test_a_wrong_line_is_refused_without_its_password(tmp_path, line):
    path = tmp_path / "users"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        Users(path, may_write=True)
    assert PASSWORD not in str(caught.value) and "short" not in str(caught.value).split()


def test_users_are_read_again_and_stay_if_that_fails(users_file):
    users = Users(users_file, may_write=True)
    users_file.write_text(f"cleo {PASSWORD}\n")
    users.reload()
    assert users.user({"Authorization": f"Bearer {PASSWORD}"}).name == "cleo"
    users_file.write_text("broken\n")
    with pytest.raises(ConfigurationError):
        users.reload()
    assert len(users) == 1


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:10405", 200), ("localhost", 200), ("[::1]:10404", 200), ("10.1.2.3", 200),
    ("ops.example", 200), ("OPS.example:443", 200), ("evil.example", 421), ("", 421),
    ("evil.example:10405", 421), ("ops.example.evil.example", 421),
])  # fmt: skip
def test_a_name_that_is_not_ours_is_refused(start, host, status):
    """Another site could let its name resolve to this console, and read the pages."""
    console = start(allowed_hosts="ops.example")
    assert console.page(Host=host).status == status


def test_a_page_may_load_nothing_but_our_own_files(console):
    reply = console.page()
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Cache-Control"] == "no-store"
    # What the policy would forbid is not there: no style and no script in the page itself.
    assert " style=" not in reply.text and "<style" not in reply.text
    assert " onclick" not in reply.text and "<script>" not in reply.text
    assert console.get("/static/console.js").status == 200
    assert console.get("/static/../settings.py").status == 404
    assert console.get("/static/%2e%2e/settings.py").status == 404


@pytest.mark.parametrize(("site", "mode", "status"), [
    ("cross-site", "no-cors", 403), ("cross-site", "cors", 403), ("same-site", "no-cors", 403),
    ("cross-site", "navigate", 200), ("same-origin", "cors", 200), ("none", "navigate", 200),
])  # fmt: skip
def test_a_page_of_another_site_may_lead_here_and_load_nothing(console, site, mode, status):
    headers = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode}
    assert console.page(**headers).status == status
    assert console.page("/workers", Accept="text/html", **headers).status == status


def test_a_defect_ends_one_response_and_is_logged(console, monkeypatch, caplog):
    def read(*_):
        raise KeyError("x")

    monkeypatch.setattr("service.console.reading.lists.running", read)
    reply = console.page("/requests")
    assert reply.status == 500 and "A defect of the console" in reply.text
    assert any("defect" in str(record.msg) for record in caplog.records)
    assert console.page("/workers").status == 200


def test_no_error_page_lacks_the_headers(console):
    for path in ("/nothing", "/queues/default/requests/a%20b", "/static/nothing"):
        assert "Content-Security-Policy" in console.get(path).headers


def test_the_cookie_is_for_no_script_and_no_other_site(console):
    cookie = console.page().headers["Set-Cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie


@pytest.mark.parametrize(("variables", "queues"), [
    ({}, ("default",)), ({"QUIRE_QUEUE": "bulk"}, ("bulk",)),
    ({"QUIRE_QUEUE": "bulk", "QUIRE_CONSOLE_QUEUES": "a, b"}, ("a", "b")),
])  # fmt: skip
def test_the_queues_are_the_workers_unless_its_own_are_named(monkeypatch, variables, queues):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ConsoleSettings.load([]).queues == queues


@pytest.mark.parametrize("flags", [("--queues", "a,a"), ("--role", "king"),
    ("--allowed-hosts", "http://x"), ("--http-host", " "), ("--refresh-seconds", "0"),
    ("--trusted-proxies", "proxy.example"), ("--trusted-proxies", "10.0.0.1/8")])  # fmt: skip
def test_wrong_settings_are_refused(flags):
    with pytest.raises((ConfigurationError, SystemExit)):
        ConsoleSettings.load(list(flags))
