"""Who is let in, as which tenant, and how urgent it may be."""

import logging

import pytest

from quire.wire.protocol import Priority
from service.gateway.callers import ApiKeys
from service.shared.settings.sources import ConfigurationError
from tests.service.builders import eventually

SEARCH, ARCHIVE = "sk-search-7fc1e2b0", "sk-archive-90aa51c3"
LINES = f"# key tenant highest priority\n\n{SEARCH} search high\n{ARCHIVE} archive low\n"


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(LINES)
    return path


@pytest.fixture
def guarded(start, keys_file):
    return start(keys_file=keys_file)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_a_stranger_is_not_let_in(guarded):
    for text in ("", "Bearer", f"Bearer {SEARCH}x", f"Basic {SEARCH}", SEARCH, "Bearer é"):
        for path in ("/v1/models", "/v1/requests/x", "/v1/requests/x/events"):
            reply = guarded.get(path, Authorization=text.encode())
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), text
            assert reply.headers["WWW-Authenticate"] == "Bearer"


def test_a_stranger_submits_nothing_and_probes_need_no_key(guarded, fake):
    assert guarded.complete().status == 401
    assert not fake.requests
    assert guarded.get("/livez").status == guarded.get("/metrics").status == 200


def test_a_key_says_whose_a_request_is_and_how_urgent_it_may_be(guarded, fake):
    for key, asked in ((SEARCH, {}), (SEARCH, {"X_Quire_Priority": "high"}), (ARCHIVE, {})):
        assert guarded.complete(headers=bearer(key) | asked).status == 200
    assert [(request.tenant, request.priority.name) for request in fake.requests] == [
        ("search", "NORMAL"), ("search", "HIGH"), ("archive", "LOW"),
    ]  # fmt: skip


@pytest.mark.parametrize(("key", "asked"), [(SEARCH, "critical"), (ARCHIVE, "normal")])
def test_nobody_is_more_urgent_than_its_key(guarded, fake, key, asked):
    reply = guarded.complete(headers=bearer(key) | {"X_Quire_Priority": asked})
    assert (reply.status, reply.error["code"]) == (403, "priority_not_allowed")
    assert not fake.requests


def test_a_request_of_another_tenant_is_unknown(guarded, fake):
    request_id = guarded.complete(headers=bearer(SEARCH)).request_id
    path = f"/v1/requests/{request_id}"
    assert guarded.get(path, **bearer(SEARCH)).status == 200
    for reply in (
        guarded.get(path, **bearer(ARCHIVE)),
        guarded.get(f"{path}/events", **bearer(ARCHIVE)),
        guarded.ask("POST", f"{path}/cancel", **bearer(ARCHIVE)),
    ):
        assert (reply.status, reply.error["code"]) == (404, "unknown_request")


def test_the_same_idempotency_key_of_two_tenants_is_two_requests(guarded, fake):
    for key in (SEARCH, ARCHIVE):
        assert guarded.complete(headers=bearer(key) | {"Idempotency_Key": "k"}).status == 200
    assert len({request.id for request in fake.requests}) == 2


def test_a_file_that_is_read_again_counts_from_then_on(keys_file):
    keys = ApiKeys(keys_file)
    assert keys.caller(bearer(SEARCH)).highest is Priority.HIGH
    keys_file.write_text(f"{SEARCH} search critical\n")
    keys.reload()
    assert keys.caller({"Authorization": f"bearer  {SEARCH}"}).highest is Priority.CRITICAL


def test_what_is_open_counts_for_its_tenant_though_keys_were_read_again(start, keys_file, script):
    script.pieces = ["one ", None]
    gateway = start(keys_file=keys_file, max_open_answers_per_tenant=1)
    with gateway.stream(headers=bearer(SEARCH)) as stream:
        stream.read_tokens(4)
        keys_file.write_text(f"{ARCHIVE} search\n")
        gateway.server._keys.reload()
        assert gateway.complete(headers=bearer(SEARCH)).status == 401
        assert gateway.complete(headers=bearer(ARCHIVE)).error["code"] == "too_many_open_answers"
        script.release.set()
        assert stream.rest()[-1].data == "[DONE]"
    assert gateway.complete(headers=bearer(ARCHIVE)).status == 200


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sk-search-7fc1e2b0", "must be `key tenant"),
        ("sk-short search", "16 characters"),
        ("sk-schlüssel-0000001 search", "ASCII"),
        ("sk-another-key-0001 a:b", "tenant must match"),
        ("sk-another-key-0001 search urgent", "must be one of low"),
        (f"{SEARCH} again", "earlier line"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_and_changes_nothing(keys_file, line, reason):
    keys = ApiKeys(keys_file)
    keys_file.write_text(f"{LINES}{line}\n")
    with pytest.raises(ConfigurationError, match=f"line 5: .*{reason}") as caught:
        keys.reload()
    assert line.split()[0] not in str(caught.value)
    assert keys.caller(bearer(ARCHIVE)).tenant == "archive"


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://page.example", "127.0.0.1:10402"),
        ("http://page.example:10402", "page.example:10402"),  # Its name points here by now.
        ("http://203.0.113.5", "127.0.0.1:10402"),
        ("http://localhost.page.example", "localhost:10402"),
        ("null", "localhost:10402"),
        ("http://[", "["),
    ],
)
def test_without_keys_no_page_of_elsewhere_uses_the_queue(gateway, fake, origin, host):
    headers = {"Origin": origin, "Host": host, "Content_Type": "text/plain"}
    reply = gateway.complete(headers=headers)
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert gateway.get("/v1/requests/x", **headers).status == 403
    assert not fake.requests


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:3000", "localhost:10402"),
        ("http://notes.localhost", "127.0.0.1:10402"),
        ("http://[::1]:3000", "127.0.0.1:10402"),
        ("http://192.0.2.7:8080", "192.0.2.7:10402"),
    ],
)
def test_pages_of_this_machine_may_use_the_queue(gateway, origin, host):
    assert gateway.complete(headers={"Origin": origin, "Host": host}).status == 200


def test_with_keys_it_is_the_key_that_counts_and_not_the_page(guarded):
    headers = bearer(SEARCH) | {"Origin": "https://page.example"}
    assert guarded.complete(headers=headers).status == 200


def test_a_file_that_is_not_there_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigurationError, match="keys_file: cannot read"):
        ApiKeys(tmp_path / "nowhere")


def test_a_key_is_in_no_log(guarded, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    assert guarded.complete(headers=bearer(SEARCH)).status == 200
    assert guarded.complete(headers=bearer(SEARCH + "x")).status == 401
    assert SEARCH not in caplog.text + "".join(capfd.readouterr())


def test_a_tenant_has_no_more_answers_open_than_its_share(start, script, keys_file):
    search, archive = bearer(SEARCH), bearer(ARCHIVE)
    gateway = start(keys_file=keys_file, max_open_answers_per_tenant=1)
    script.pieces = ["one ", None]
    with gateway.stream(headers=search) as stream:
        stream.read_tokens(4)
        for reply in (
            gateway.complete(headers=search),
            gateway.get(f"/v1/requests/{stream.request_id}", **search),
            gateway.get(f"/v1/requests/{stream.request_id}/events", **search),
        ):
            assert (reply.status, reply.error["code"]) == (429, "too_many_open_answers")
            assert reply.error["type"] == "rate_limit_error"
            assert "'search'" in reply.error["message"]
            assert int(reply.headers["Retry-After"]) > 0
        told = {"route": "completions", "status": "429"}
        assert gateway.metric("quire_gateway_responses_total", **told) == 1
        # What keeps no place open can be asked for: the tenant could not end its request otherwise.
        assert gateway.get("/v1/models", **search).status == 200
        with gateway.stream(headers=archive) as other:
            other.read_tokens(4)
        path = f"/v1/requests/{stream.request_id}/cancel"
        assert gateway.ask("POST", path, **search).status == 200
        stream.rest()
    script.release.set()
    eventually(lambda: gateway.complete(headers=search).status == 200, "there is room again")


def test_without_a_share_one_tenant_may_have_every_place(start, script):
    gateway = start(max_open_answers=2)
    script.pieces = ["one ", None]
    with gateway.stream() as one, gateway.stream() as other:
        one.read_tokens(4)
        other.read_tokens(4)
        assert gateway.complete().error["code"] == "gateway_full"


def test_without_keys_all_callers_are_one_tenant(start, script):
    gateway = start(max_open_answers_per_tenant=1)
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        assert gateway.complete().error["code"] == "too_many_open_answers"
