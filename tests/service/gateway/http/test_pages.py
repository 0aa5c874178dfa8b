"""What a browser needs: an end to its reconnections, and leave to read for pages of elsewhere."""

import pytest

from service.gateway.http.cors import EXPOSED_HEADERS
from service.gateway.settings import GatewaySettings
from service.shared.settings.sources import ConfigurationError
from tests.service.gateway.front import COMPLETIONS
from tests.service.gateway.test_callers import SEARCH, bearer

PAGE, OTHER = "https://page.example", "https://other.example"


def events(request_id, query=""):
    return f"/v1/requests/{request_id}/events{query}"


# -- the end of a stream --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_who_comes_back_to_a_stream_that_is_over_is_told_to_stop(gateway, n):
    with gateway.stream(n=n) as stream:
        last = stream.rest()[-1].id
    reply = gateway.get(events(stream.request_id), Last_Event_ID=last)
    assert (reply.status, reply.text) == (204, "")
    assert reply.request_id == stream.request_id
    assert reply.headers["Content-Type"] is None
    told = {"route": "events", "status": "204"}
    assert gateway.metric("quire_gateway_responses_total", **told) == 1
    assert gateway.metric("quire_gateway_streams_resumed_total") == 0


def test_what_is_missing_still_comes_and_then_it_is_over(gateway):
    with gateway.stream(stream_options={"include_usage": True}) as stream:
        *_, end, usage, done = stream.rest()
    path = events(stream.request_id, "?include_usage=true")
    assert gateway.get(path, Last_Event_ID=end.id).events == [usage, done]
    assert usage.id == done.id == f"{end.id}/usage"
    assert gateway.get(path, Last_Event_ID=usage.id).status == 204
    # Who does not ask for the usage has all without it.
    assert gateway.get(events(stream.request_id), Last_Event_ID=end.id).status == 204
    assert gateway.get(events(stream.request_id), Last_Event_ID=usage.id).status == 204


def test_a_repeated_call_that_has_all_is_over_as_well(gateway, fake):
    key = {"Idempotency_Key": "k"}
    with gateway.stream(headers=key) as stream:
        last = stream.rest()[-1].id
    with gateway.stream(headers=key | {"Last_Event_ID": last}) as again:
        assert again.status == 204
    assert len(fake.requests) == 1


def test_a_stream_that_has_not_ended_is_not_over_whatever_its_caller_says(gateway, script):
    script.pieces = ["one ", None, "two"]
    with gateway.stream() as stream:
        first = stream.next()
        script.release.set()
        with gateway.resume(stream.request_id, f"{first.id}/end") as again:
            assert again.status == 200
            assert [event.text for event in again.rest()] == ["two", "", ""]


def test_the_end_of_another_history_is_no_end(gateway):
    with gateway.stream() as stream:
        last = stream.rest()[-1].id
    number, _, end = last.split("/")
    reply = gateway.get(events(stream.request_id), Last_Event_ID=f"{number}/1.2/{end}")
    assert (reply.status, reply.error["code"]) == (409, "output_rewound")


# -- pages of other origins -----------------------------------------------------------------------


@pytest.fixture
def open_to(start, tmp_path):
    (tmp_path / "keys").write_text(f"{SEARCH} search\n")

    def start_one(*origins, **settings):
        return start(allowed_origins=origins, keys_file=tmp_path / "keys", **settings)

    return start_one


def preflight(gateway, origin, path=COMPLETIONS, method="POST"):
    asked = "authorization,content-type,x-stainless-lang,last-event-id"
    names = {"Access_Control_Request_Method": method, "Access_Control_Request_Headers": asked}
    return gateway.ask("OPTIONS", path, Origin=origin, **names)


def test_without_the_setting_no_page_of_elsewhere_reads_anything(gateway):
    reply = gateway.complete(headers={"Origin": "http://localhost:3000"})
    assert reply.status == 200
    assert not [name for name in reply.headers if name.lower().startswith("access-control-")]
    assert preflight(gateway, "http://localhost:3000").status == 405


def test_a_preflight_of_an_allowed_page_needs_no_key_and_allows_one(open_to):
    gateway = open_to(PAGE, "http://192.0.2.7:8080")
    for path, method in ((COMPLETIONS, "POST"), (events("req-1"), "GET"), ("/v1/models", "GET")):
        reply = preflight(gateway, PAGE, path, method)
        assert reply.status == 200
        assert reply.headers["Access-Control-Allow-Origin"] == PAGE
        assert "authorization" in reply.headers["Access-Control-Allow-Headers"]
        assert method in reply.headers["Access-Control-Allow-Methods"]
        assert reply.headers["Access-Control-Allow-Credentials"] is None
    stranger = preflight(gateway, OTHER)
    assert stranger.status == 400
    assert stranger.headers["Access-Control-Allow-Origin"] is None


def may_read(reply, origin):
    assert reply.headers["Access-Control-Allow-Origin"] == origin, reply
    assert set(reply.headers["Access-Control-Expose-Headers"].split(", ")) == set(EXPOSED_HEADERS)
    assert "Origin" in reply.headers["Vary"]
    return reply


def test_every_answer_can_be_read_by_an_allowed_page(open_to, script):
    gateway, known = open_to(PAGE, max_body_bytes=1 << 16), bearer(SEARCH) | {"Origin": PAGE}
    assert may_read(gateway.complete(headers=known), PAGE).status == 200
    assert may_read(gateway.complete(headers={"Origin": PAGE}), PAGE).status == 401
    assert may_read(gateway.complete("x" * (1 << 17), headers=known), PAGE).status == 413
    assert may_read(gateway.complete(5, headers=known), PAGE).status == 400
    assert may_read(gateway.get("/v1/nowhere", **known), PAGE).status == 404
    assert may_read(gateway.get(COMPLETIONS, **known), PAGE).status == 405
    whole = may_read(gateway.complete(headers=known, stream=True), PAGE)
    path = events(whole.request_id)
    assert may_read(gateway.get(path, **known), PAGE).events == whole.events
    last = {"Last_Event_ID": whole.events[-1].id}
    assert may_read(gateway.get(path, **known, **last), PAGE).status == 204
    script.pieces = [RuntimeError("broken")]
    assert may_read(gateway.complete(headers=known), PAGE).status == 500
    gateway.server._lifecycle.drain()
    reply = may_read(gateway.complete(headers=known), PAGE)
    assert (reply.status, reply.headers["Connection"]) == (503, "close")


def test_a_page_that_is_not_allowed_is_answered_and_reads_nothing(open_to):
    reply = open_to(PAGE).complete(headers=bearer(SEARCH) | {"Origin": OTHER})
    assert reply.status == 200
    assert reply.headers["Access-Control-Allow-Origin"] is None


def test_a_star_allows_every_page(open_to):
    gateway = open_to("*")
    for origin in (PAGE, OTHER, "null"):
        assert preflight(gateway, origin).headers["Access-Control-Allow-Origin"] == "*"
        reply = gateway.complete(headers=bearer(SEARCH) | {"Origin": origin})
        assert reply.headers["Access-Control-Allow-Origin"] == "*"
        assert reply.headers["Access-Control-Allow-Credentials"] is None


def test_without_keys_an_allowed_page_is_let_in_and_another_is_not(start):
    gateway = start(allowed_origins=(PAGE,))
    assert may_read(gateway.complete(headers={"Origin": PAGE}), PAGE).status == 200
    reply = gateway.complete(headers={"Origin": OTHER})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert start(allowed_origins=("*",)).complete(headers={"Origin": OTHER}).status == 200


def test_origins_are_written_as_browsers_write_them():
    def origins(text):
        return GatewaySettings.load(["--allowed-origins", text]).allowed_origins

    assert origins("https://page.example, http://localhost:3000") == (
        "https://page.example", "http://localhost:3000",
    )  # fmt: skip
    assert origins("*") == ("*",)
    assert origins("") == GatewaySettings().allowed_origins == ()
    for wrong in ("page.example", "https://page.example/", "https://*.example", "https://P.ex"):
        with pytest.raises(ConfigurationError, match="allowed_origins"):
            origins(wrong)
