"""Streams that are interrupted: by the caller, by the gateway, by Redis; and where they go on."""

import re

import pytest
from structlog.testing import capture_logs

from quire.errors import RequestFailed
from service.gateway.streaming import JOINED_BYTES, EventStream, joined
from tests.service.builders import eventually
from tests.service.gateway.builders import state_of, wait_until_cancelled
from tests.service.gateway.front import CHAT, KEY, text_of_events


def test_who_comes_back_to_another_gateway_gets_the_next_token(start, fake, script):
    script.pieces = ["one ", "two ", None, "three ", "four"]
    with start().stream(headers=KEY) as stream:
        seen = stream.read_tokens(8)
    script.release.set()
    with start().resume(stream.request_id, seen[-1].id) as again:
        rest = again.rest()
    assert text_of_events(seen) == "one two "
    assert text_of_events(rest) == "three four"
    assert rest[-1].data == "[DONE]"
    assert len(fake.requests) == 1


def test_a_bare_number_of_tokens_is_a_place_even_in_the_middle_of_a_piece(gateway):
    request_id = gateway.complete().request_id
    with gateway.resume(request_id, "6") as again:
        assert text_of_events(again.rest()) == "o three"


def test_without_a_place_a_stream_is_told_from_its_beginning(gateway):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    request_id = gateway.ask("POST", CHAT, body).request_id
    with gateway.resume(request_id) as again:
        first, *rest = again.rest()
    assert first.choice["delta"] == {"role": "assistant", "content": ""}
    assert text_of_events(rest) == "one two three"
    with gateway.resume(request_id, "0") as again:
        assert again.next().text == "one "


def test_events_that_are_ready_at_once_are_sent_together_each_with_its_own_id(gateway, monkeypatch):
    bodies: list[bytes] = []
    plain = EventStream._send

    def send(self, body, send):
        bodies.append(body)
        return plain(self, body, send)

    request_id = gateway.complete().request_id
    monkeypatch.setattr(EventStream, "_send", send)
    with gateway.resume(request_id) as again:
        events = again.rest()
    assert [event.text for event in events] == ["one ", "two ", "three", "", ""]
    assert [event.id.split("/")[0] for event in events] == ["4", "8", "13", "13", "13"]
    pieces, done = bodies
    assert (pieces.count(b"id: "), pieces.count(b"data: "), done) == (4, 4, b"data: [DONE]\n\n")
    with gateway.resume(request_id, events[1].id) as again:
        assert [event.text for event in again.rest()] == ["three", "", ""]


def test_joined_events_keep_their_order_and_are_formed_only_as_they_are_taken():
    formed: list[int] = []

    def events():
        for number in range(10):
            formed.append(number)
            yield bytes([number]) * (JOINED_BYTES // 2)

    bodies = joined(events())
    first = next(bodies)
    assert (len(first), formed) == (JOINED_BYTES, [0, 1])
    whole = first + b"".join(bodies)
    assert whole == b"".join(bytes([number]) * (JOINED_BYTES // 2) for number in range(10))
    assert list(joined([b"x" * 3 * JOINED_BYTES, b"y"])) == [b"x" * 3 * JOINED_BYTES, b"y"]
    assert list(joined([])) == []


def test_several_choices_go_on_each_at_its_own_place(gateway):
    request_id = gateway.complete(n=2).request_id
    with gateway.resume(request_id, "13,4") as again:
        events = again.rest()
    texts = ["", ""]
    for event in events[:-1]:
        texts[event.choice["index"]] += event.text
    assert texts == ["", "two three"]


def test_a_place_that_no_stream_has_is_refused(gateway):
    path = f"/v1/requests/{gateway.complete().request_id}/events"
    for last in ("", "x", "-1", "1,2", "1/2", "1/2.3/on", "1/2.3/end/4", "9" * 99):
        reply = gateway.get(path, Last_Event_ID=last)
        assert (reply.status, reply.error["param"]) == (400, "Last-Event-ID"), last


def test_the_whole_answer_can_be_fetched_again_from_any_gateway(start):
    reply = start().complete(n=2)
    again = start().get(f"/v1/requests/{reply.request_id}")
    assert again.body == reply.body


def test_a_request_that_there_is_not_is_told_so(gateway):
    for request_id in ("req-unknown", "a*b", "x" * 200):
        for path in ("", "/events"):
            reply = gateway.get(f"/v1/requests/{request_id}{path}")
            assert (reply.status, reply.error["code"]) == (404, "unknown_request")


def test_a_request_that_came_in_another_way_can_be_followed_too(gateway, fake):
    handle = fake.client().submit("x", request_id="from-elsewhere")
    handle.result(timeout=10)
    assert gateway.get("/v1/requests/from-elsewhere").text_of_choice == "one two three"


# -- hanging up -----------------------------------------------------------------------------------


def test_who_hangs_up_ends_all_requests_of_the_call(gateway, fake, script):
    script.pieces = ["one ", None]
    with gateway.stream(n=2) as stream:
        stream.read_tokens(4)
    wait_until_cancelled(fake, stream.request_id, f"{stream.request_id}:1")
    # It is counted when the gateway has the answer of Redis, which the worker may have before it.
    assert gateway.wait_for_hang_up("cancelled") == 1


def test_who_hangs_up_before_a_whole_answer_ends_it_too(gateway, fake, script):
    script.pieces = [None]
    connection = gateway.send("POST", "/v1/completions", {"prompt": "x"})
    eventually(lambda: fake.requests, "the request runs")
    connection.close()
    (request,) = fake.requests
    wait_until_cancelled(fake, request.id)
    told = {"route": "completions", "status": "499"}
    eventually(lambda: gateway.metric("quire_gateway_responses_total", **told) == 1, "counted")


def test_who_hangs_up_with_an_idempotency_key_means_to_come_back(gateway, fake, script):
    script.pieces = ["one ", None, "two"]
    with gateway.stream(headers=KEY) as stream:
        seen = stream.read_tokens(4)
    gateway.wait_for_hang_up("left")
    script.release.set()
    with gateway.resume(stream.request_id, seen[-1].id) as again:
        assert text_of_events(again.rest()) == "two"
    assert state_of(fake, stream.request_id) == "completed"


def test_who_only_reads_changes_nothing_by_going(gateway, fake, script):
    script.pieces = ["one ", None, "two"]
    with gateway.stream(headers=KEY) as stream:
        stream.read_tokens(4)
        with gateway.resume(stream.request_id) as reader:
            reader.read_tokens(4)
        gateway.wait_for_hang_up("left")
        script.release.set()
        assert text_of_events(stream.rest()) == "two"


def test_a_caller_can_end_its_request_by_its_id(gateway, fake, script, worker_held):
    script.pieces = ["one ", None]
    with gateway.stream(headers=KEY) as stream:
        stream.read_tokens(4)
        with worker_held():
            reply = gateway.ask("POST", f"/v1/requests/{stream.request_id}/cancel")
        assert reply.body["id"] == stream.request_id
        # A worker has it, and ends it soon; meanwhile the answer says what it does there.
        assert (reply.body["status"], reply.body["activity"]) == ("running", "decoding")
        (error,) = stream.rest()
    assert error.body["error"]["code"] == "cancelled"
    assert state_of(fake, stream.request_id) == "cancelled"


# -- idempotency keys -----------------------------------------------------------------------------


def test_a_call_that_is_repeated_with_its_key_joins_the_same_generation(start, fake, script):
    script.pieces = ["one ", None, "two"]
    with start().stream(headers=KEY, n=2) as stream:
        stream.read_tokens(4)
    again = start()
    body = {"prompt": "x", "n": 2}
    connection = again.send("POST", "/v1/completions", body, **KEY)
    script.release.set()
    assert connection.getresponse().headers["X-Request-ID"] == stream.request_id
    connection.close()
    assert len(fake.requests) == 2


def test_a_stream_that_is_repeated_with_its_key_goes_on_behind_the_last_event(gateway, fake):
    with gateway.stream(headers=KEY) as stream:
        first = stream.next()
    with gateway.stream(headers=KEY | {"Last_Event_ID": first.id}) as again:
        assert text_of_events(again.rest()) == "two three"
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "y"}),
        ("/v1/completions", {"prompt": "x", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_key_that_came_with_another_body_is_refused(gateway, fake, path, body):
    assert gateway.complete("x", headers=KEY).status == 200
    reply = gateway.ask("POST", path, body, **KEY)
    assert (reply.status, reply.error["code"]) == (422, "idempotency_key_reused")
    assert len(fake.requests) == 1


def test_a_key_that_came_with_another_body_is_refused_while_that_is_answered(gateway, script, fake):
    script.pieces = ["one ", None, "two"]
    with gateway.stream(headers=KEY) as stream:
        stream.next()
        for other in ({"prompt": "y"}, {"prompt": "x", "n": 2}, {"prompt": "x", "user": "u"}):
            reply = gateway.ask("POST", "/v1/completions", other, **KEY)
            assert (reply.status, reply.error["code"]) == (422, "idempotency_key_reused")
        script.release.set()
        assert text_of_events(stream.rest()) == "two"
    assert len(fake.requests) == 1


def test_how_the_answer_is_told_is_no_other_body(gateway, fake):
    whole = gateway.complete("x", headers=KEY)
    with gateway.stream("x", headers=KEY, stream_options={"include_usage": True}) as stream:
        assert text_of_events(stream.rest()) == whole.text_of_choice
    assert len(fake.requests) == 1


def test_a_repeated_call_begins_its_answer_with_the_same_head(gateway):
    assert gateway.complete(headers=KEY).body == gateway.complete(headers=KEY).body


# -- what goes wrong ------------------------------------------------------------------------------


def test_what_fails_before_the_first_word_is_told_by_a_status(gateway, script, patient_status):
    script.pieces = [RequestFailed("invalid_request", "is too long", "body.prompt")]
    for fields in ({}, {"stream": True}):
        reply = gateway.complete(**fields)
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert reply.error["message"] == "is too long"
        assert re.match("req-", reply.request_id)


def test_a_failure_in_the_middle_is_an_event_with_an_error_and_the_end(gateway, script):
    script.pieces = ["one ", None, RequestFailed("engine_error", "the device is gone")]
    with gateway.stream() as stream:
        seen = stream.read_tokens(4)
        script.release.set()
        (error,) = stream.rest()
    assert error.body["error"] == {
        "message": "the device is gone", "type": "server_error", "param": None,
        "code": "engine_error",
    }  # fmt: skip
    assert error.id == seen[-1].id
    assert gateway.metric("quire_gateway_streams_broken_total", reason="failed") == 1


def test_what_was_said_before_a_failure_is_told_also_where_both_are_read_at_once(gateway, script):
    script.pieces = ["one ", "two ", RequestFailed("engine_error", "the device is gone")]
    with gateway.stream(headers=KEY) as stream:
        stream.rest()
    with gateway.resume(stream.request_id) as again:
        *pieces, error = again.rest()
    assert text_of_events(pieces) == "one two "
    assert (error.body["error"]["code"], error.id) == ("engine_error", pieces[-1].id)


def test_what_follows_from_what_was_told_is_told_also_where_the_rest_of_the_read_does_not(
    gateway, fake
):
    request_id = gateway.complete().request_id
    log = fake.broker.keys.output(request_id)
    entries = fake.connection.xrange(log)
    fake.connection.delete(log)
    for number, (entry_id, fields) in enumerate(entries):
        changed = fields | {b"prefix": b"1.1"} if number == 1 else fields
        fake.connection.xadd(log, changed, id=entry_id)
    with gateway.resume(request_id) as again:
        piece, error = again.rest()
    assert piece.text == "one "
    assert error.body["error"]["code"] == "output_rewound"


def test_when_one_choice_fails_the_others_are_ended(gateway, fake, script):
    def piece(request):
        if ":1" in request.id:
            raise RequestFailed("engine_error", "the device is gone")
        return "one "

    script.pieces = [piece, None]
    assert gateway.complete(n=2).error["code"] == "engine_error"
    first = next(request.id for request in fake.requests if ":" not in request.id)
    wait_until_cancelled(fake, first)


def test_a_deadline_is_an_error_that_is_not_to_be_repeated(gateway, script):
    script.pieces = [None]
    reply = gateway.complete(headers={"X_Quire_Deadline": "0.05"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"


def test_a_full_queue_is_told_with_the_time_to_come_back(start, fake, script):
    script.pieces = [None]
    gateway = start(max_backlog=2)
    fake.broker.pause("a test fills it")
    reply = gateway.complete(n=3)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert int(reply.headers["Retry-After"]) > 0
    # What was taken of it is not left behind.
    assert fake.connection.hlen(fake.broker.keys.open) == 0


def test_a_redis_that_is_away_is_told_so_and_the_gateway_is_not_ready(gateway, fake):
    assert gateway.complete().status == 200
    with fake.outage():
        with capture_logs() as said:
            reply = gateway.complete()
        assert (reply.status, reply.error["code"]) == (503, "broker_unavailable")
        assert "Retry-After" in reply.headers
        # Where Redis is concerns those who run it, and not every tenant.
        assert reply.error["message"] == "the queue cannot be reached now; try again"
        assert [line["reason"][:23] for line in said] == ["Redis cannot be reached"]
        refused = gateway.get("/readyz")
        assert (refused.status, refused.body["reason"]) == (503, "Redis does not answer")
        assert gateway.get("/livez").status == 200
    assert gateway.get("/readyz").status == 200


def test_a_stream_that_redis_leaves_can_be_gone_on_with(gateway, fake, script):
    script.pieces = ["one ", None, "two"]
    with gateway.stream(headers=KEY) as stream:
        stream.read_tokens(4)
        with fake.outage(), capture_logs() as said:
            (error,) = stream.rest()
    assert error.body["error"]["code"] == "broker_unavailable"
    assert "Redis" not in error.data
    assert [line["reason"][:23] for line in said] == ["Redis cannot be reached"]
    script.release.set()
    with gateway.resume(stream.request_id, error.id) as again:
        assert text_of_events(again.rest()) == "two"


def test_a_log_that_lost_what_was_told_says_from_where_to_go_on(gateway, fake, script):
    script.pieces = ["one ", "two ", None]
    with gateway.stream(headers=KEY) as stream:
        stream.read_tokens(8)
        log = fake.broker.keys.output(stream.request_id)
        last, _ = fake.connection.xrevrange(log, count=1)[0]
        record, place = fake.broker.keys.request(stream.request_id), fake.broker.keys.log_positions
        kept = fake.connection.xrange(log)[0][1][b"prefix"]
        fake.connection.xdel(log, last)
        fake.connection.hset(record, mapping={"published": 4, "prefix": kept})
        fake.connection.hdel(place, stream.request_id)
        (error,) = stream.rest()
    assert (error.body["error"]["code"], error.body["error"]["kept"]) == ("output_rewound", 4)
    assert error.id == "4"
    assert gateway.metric("quire_gateway_streams_broken_total", reason="rewound") == 1


def test_a_place_in_a_log_that_is_another_by_now_is_refused(gateway):
    request_id = gateway.complete().request_id
    reply = gateway.get(f"/v1/requests/{request_id}/events", Last_Event_ID="4/1.1")
    assert (reply.status, reply.error["code"]) == (409, "output_rewound")


def test_answers_beyond_the_limit_are_refused_until_there_is_room(start, script):
    script.pieces = ["one ", None]
    gateway = start(max_open_answers=1)
    with gateway.stream() as stream:
        stream.read_tokens(4)
        reply = gateway.complete()
        assert (reply.status, reply.error["code"]) == (503, "gateway_full")
        # Another gateway may have room, and a kept connection leads to this one only.
        assert reply.headers["Connection"] == "close"
        assert gateway.metric("quire_gateway_open_answers", kind="open") == 1
    eventually(lambda: gateway.metric("quire_gateway_open_answers", kind="open") == 0, "room")
    script.release.set()
    assert gateway.complete().status == 200
