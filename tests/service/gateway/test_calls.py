"""What a caller of OpenAI's API asks, and what it is answered, as a whole and in a stream."""

import asyncio
import json
from bisect import bisect_left

import pytest

from quire.errors import UnknownRequest
from quire.testing.in_memory import FakeQuire
from quire.wire.codec import MAX_MESSAGE_BYTES
from quire.wire.protocol import Priority
from service.gateway import idempotency
from service.gateway.idempotency import call_of
from tests.service.builders import eventually
from tests.service.gateway.builders import GatewayThread
from tests.service.gateway.front import CHAT, COMPLETIONS

MESSAGES = [{"role": "user", "content": "hello"}]
#: Of the bytes of a request, the others hardly count.
LONG = "x" * 20_000


def test_a_completion_is_answered_in_openais_form_under_the_id_of_its_request(gateway, fake):
    reply = gateway.complete("x", model="fake", max_tokens=16)
    (request,) = fake.requests
    assert reply.status == 200
    assert reply.request_id == reply.body["id"] == request.id
    assert reply.body | {"created": 0} == {
        "id": request.id, "object": "text_completion", "created": 0, "model": "fake",
        "choices": [
            {"index": 0, "text": "one two three", "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {
            "prompt_tokens": 1, "completion_tokens": 13, "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": "fake",
    }  # fmt: skip
    assert (request.kind, request.body["max_tokens"]) == ("completions", 16)


def test_a_chat_is_answered_by_a_message(gateway, fake):
    reply = gateway.ask("POST", CHAT, {"messages": MESSAGES})
    assert reply.body["object"] == "chat.completion"
    assert reply.body["choices"][0]["message"] == {
        "role": "assistant", "content": "one two three",
    }  # fmt: skip
    assert fake.requests[0].body["messages"] == MESSAGES


def test_several_choices_are_requests_of_their_own_and_one_answer(gateway, fake):
    reply = gateway.complete(n=3)
    assert [choice["index"] for choice in reply.body["choices"]] == [0, 1, 2]
    assert reply.body["usage"]["completion_tokens"] == 3 * 13
    assert len({request.body["seed"] for request in fake.requests}) == 3
    first = reply.request_id
    assert {request.id for request in fake.requests} == {first, f"{first}:1", f"{first}:2"}


def test_log_probabilities_come_in_openais_two_shapes(gateway):
    choice = gateway.complete(logprobs=1).body["choices"][0]
    assert choice["logprobs"]["tokens"][:3] == ["o", "n", "e"]
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    content = gateway.ask("POST", CHAT, chat).body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:3]] == ["o", "n", "e"]


def test_a_stream_tells_pieces_an_end_and_that_it_is_done(gateway):
    with gateway.stream(model="fake") as stream:
        events = stream.rest()
    assert [event.text for event in events] == ["one ", "two ", "three", "", ""]
    assert {event.body["id"] for event in events[:-1]} == {stream.request_id}
    assert [event.choice["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]
    assert events[-1].data == "[DONE]"
    assert "usage" not in events[0].body


def test_every_event_says_how_many_tokens_the_caller_has(gateway):
    with gateway.stream() as stream:
        ids = [event.id for event in stream.rest()]
    assert [event_id.split("/")[0] for event_id in ids] == ["4", "8", "13", "13", "13"]
    assert ids[-1].endswith("/end")


def test_a_streamed_chat_says_first_who_speaks(gateway):
    reply = gateway.ask("POST", CHAT, {"messages": MESSAGES, "stream": True})
    first, *pieces, end, done = reply.events
    assert first.choice["delta"] == {"role": "assistant", "content": ""}
    assert [piece.choice["delta"] for piece in pieces] == [
        {"content": "one "}, {"content": "two "}, {"content": "three"},
    ]  # fmt: skip
    assert (end.choice["delta"], end.choice["finish_reason"]) == ({}, "stop")
    assert done.data == "[DONE]"
    assert reply.headers["Content-Type"].startswith("text/event-stream")


def test_the_usage_of_a_stream_comes_last_where_it_is_asked_for(gateway):
    with gateway.stream(stream_options={"include_usage": True}, n=2) as stream:
        *pieces, usage, _ = stream.rest()
    assert {json.dumps(piece.body["usage"]) for piece in pieces} == {"null"}
    assert (usage.body["choices"], usage.body["usage"]["completion_tokens"]) == ([], 26)


def test_the_pieces_of_several_choices_are_told_by_their_index(gateway):
    with gateway.stream(n=2) as stream:
        events = stream.rest()
    texts = ["", ""]
    for event in events[:-1]:
        texts[event.choice["index"]] += event.text
    assert texts == ["one two three"] * 2
    assert events[-1].id.count(",") == 1 and events[-1].id.count("/end") == 2


def test_headers_say_how_a_request_is_treated(gateway, fake):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"X_Quire_Priority": "high", "X_Quire_Deadline": "60", "traceparent": trace}
    assert gateway.complete(headers=headers).status == 200
    (request,) = fake.requests
    assert (request.priority.name, request.headers) == ("HIGH", {"traceparent": trace})
    assert 0 < request.deadline_ms - fake.broker.now_ms() <= 60_000


def test_a_trace_that_is_none_is_ignored(gateway, fake):
    assert gateway.complete(headers={"traceparent": "00-1-2-3"}).status == 200
    assert fake.requests[0].headers == {}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt.1"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt.1"),
        (COMPLETIONS, {"prompt": [["a", "b"]]}, "prompt.0"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 0}, "n"),
        (CHAT, {"messages": MESSAGES, "prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "n": 129}, "n"),
        (COMPLETIONS, {"prompt": "x", "n": "two"}, "n"),
        (COMPLETIONS, {"prompt": "x", "model": 7}, "model"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options"),
        (
            COMPLETIONS,
            {"prompt": "x", "stream": True, "stream_options": {"chunks": 1}},
            "stream_options.chunks",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, [], "body"),
        (CHAT, b"{", "body"),
        (CHAT, b"[" * 100_000, "body"),
        (CHAT, b"\xff", "body"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', "prompt"),
        (COMPLETIONS, b'{"prompt": ["a", "\\ud800"]}', "prompt.1"),
        (COMPLETIONS, b'{"prompt": "x", "user": "\\ud800"}', "user"),
        (COMPLETIONS, b'{"prompt": "x", "user": 18446744073709551616}', "user"),
        (COMPLETIONS, b'{"prompt": "x", "user": NaN}', "user"),
        (COMPLETIONS, b'{"prompt": "x", "user": [1, {"a": 1e999}]}', "user.1.a"),
        (COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "seed"),
        (COMPLETIONS, b'{"prompt": "x", "prompt": "y"}', "prompt"),
        (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"52": 1, "52": 2}}', "logit_bias.52"),
        (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"052": 1, "52": 2}}', "logit_bias.052"),
        (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"9999999999": 1}}', "logit_bias.9999999999"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"7" * 900: 1}}, f"logit_bias.{'7' * 64}"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"52": 101}}, "logit_bias.52"),
        (COMPLETIONS, {"prompt": "x", "max_completion_tokens": 0}, "max_completion_tokens"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "messages.0.content",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
            "messages.0.content.0.text",
        ),
        (COMPLETIONS, b'{"prompt": "x", "\\ud800": 1}', "\ud800"),
    ],
)
def test_a_field_that_cannot_be_right_is_refused_by_its_name(refused, path, body, param):
    reply = refused(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_fields_of_a_chat_that_say_nothing_are_read_over(gateway):
    fields = {"tools": [], "logit_bias": None, "n": 1, "modalities": ["text"], "audio": None}
    reply = gateway.ask("POST", CHAT, {"messages": MESSAGES} | fields)
    assert reply.status == 200


def test_a_field_of_openais_that_is_not_served_is_told_as_one(gateway):
    reply = gateway.ask("POST", CHAT, {"messages": MESSAGES, "echo": True})
    assert (reply.status, reply.error["param"]) == (400, "echo")
    assert reply.error["message"] == (
        "body.echo: is not supported: the caller has the prompt: leave it out, or set it to false"
    )


def test_options_of_a_stream_that_say_nothing_are_read_over(gateway):
    options = {"include_obfuscation": False, "include_usage": None, "chunks": None}
    reply = gateway.complete(stream=True, stream_options=options)
    assert reply.status == 200
    assert "".join(event.text for event in reply.events) == "one two three"


@pytest.mark.parametrize(
    ("refused", "param", "served"),
    [
        ((LONG, 17), "n", (LONG, 16)),
        (([LONG] * 6, 3), "prompt", ([LONG] * 6, 2)),
        ((["x", LONG], 17), "prompt", (["x", LONG], 16)),
    ],
)
def test_the_prompts_of_all_choices_are_refused_before_the_queue_holds_them(
    gateway, fake, monkeypatch, refused, param, served
):
    monkeypatch.setattr(idempotency, "MAX_CALL_BYTES", 17 * len(LONG))
    prompt, number = refused
    reply = gateway.complete(prompt, n=number)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not fake.requests
    prompt, number = served
    assert gateway.complete(prompt, n=number).status == 200


def test_a_call_of_which_one_choice_is_too_long_sends_none(gateway, fake):
    """The last one has a longer seed and number; with a key the first is sent by itself."""

    def is_refused(length: int) -> bool:
        body = {"prompt": ["x", "x" * length], "n": 2, "seed": 7}
        key = str(length)
        reply = gateway.complete(**body, headers={"Idempotency_Key": key})
        if reply.status == 200:
            return False
        assert "the limit is" in reply.error["message"]
        call = call_of("completions", body, tenant="default", key=key, model="fake")
        with pytest.raises(UnknownRequest):
            fake.broker.status(call.record.id)
        return True

    lengths = range(MAX_MESSAGE_BYTES - 240, MAX_MESSAGE_BYTES - 80)
    # The search ends at the shortest that is refused, of which one choice alone is too long.
    assert 0 < bisect_left(lengths, True, key=is_refused) < len(lengths)


def test_while_the_choices_of_a_call_are_made_ready_others_get_on():
    body = {"prompt": "x", "n": 100}
    call = call_of("completions", body, tenant="default", key=None, model="fake")

    async def turns_of_others() -> int:
        making = asyncio.create_task(call.messages(priority=Priority.NORMAL))
        turns = 0
        while not making.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(await making) == 100
        return turns

    assert asyncio.run(turns_of_others()) >= 99


def test_a_body_of_any_depth_is_refused_as_what_it_is(gateway, fake):
    # Among them are those that can just be read, but not be written again for their digest.
    for depth in range(940, 1000, 3):
        stop = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"prompt": "x", "stop": ' + stop + b"}"
        reply = gateway.ask("POST", COMPLETIONS, body, Idempotency_Key="deep")
        assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert not fake.requests


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X_Quire_Priority", "urgent"), ("X_Quire_Deadline", "soon"), ("X_Quire_Deadline", "-1"),
        ("X_Quire_Deadline", "nan"), ("Idempotency_Key", ""), ("Idempotency_Key", "k" * 256),
        ("X_Quire_Session", "a b"), ("X_Quire_Target_Latency", "soon"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_right_is_refused_by_its_name(refused, name, value):
    reply = refused(COMPLETIONS, {"prompt": "x"}, **{name: value})
    assert (reply.status, reply.error["param"]) == (400, name.replace("_", "-"))


def test_a_body_that_is_too_long_is_refused_before_it_is_read(start):
    gateway = start(max_body_bytes=100)
    announced = gateway.complete("x" * 200)
    assert (announced.status, announced.error["code"]) == (413, "body_too_large")
    connection = gateway.send("POST", COMPLETIONS, iter([b"x" * 80, b"x" * 80]))
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_never_comes_is_waited_for_no_longer_than_said(start):
    gateway = start(body_timeout_seconds=0.05)
    reply = gateway.ask("POST", COMPLETIONS, b"{", Content_Length="10")
    assert (reply.status, reply.error["code"]) == (408, "body_timeout")


def test_what_there_is_not_is_told_in_openais_form(gateway):
    reply = gateway.get("/v1/translations")
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")
    assert reply.error["message"] == "this gateway has no path /v1/translations"
    for method, path in [
        ("GET", COMPLETIONS), ("DELETE", "/v1/models/fake"), ("POST", "/v1/requests/req-1"),
    ]:  # fmt: skip
        reply = gateway.ask(method, path)
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
        assert reply.error["message"].startswith(f"{path} does not take {method}; it takes ")
        assert reply.headers["Allow"] in reply.error["message"]


def test_models_are_those_that_workers_serve_and_no_other_is_asked_of_them(gateway, fake):
    listed = gateway.get("/v1/models").body
    assert [model["id"] for model in listed["data"]] == ["fake"]
    assert gateway.get("/v1/models/fake").body["object"] == "model"
    for reply in (gateway.get("/v1/models/other"), gateway.complete(model="other")):
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert not fake.requests
    fake.broker.beat_worker("w2", "ready", {}, model="org/other")
    assert gateway.complete(model="org/other").status == 200
    assert gateway.get("/v1/models/org/other").body["id"] == "org/other"


def test_where_no_worker_is_there_a_model_is_its_to_refuse(gateway, fake):
    fake.broker.beat_worker("w", "stopped", {}, model="fake")
    assert gateway.complete(model="whatever").body["model"] == "whatever"


def test_a_deadline_is_kept_where_no_worker_is_alive(patient_status):
    soon = {"X_Quire_Deadline": "0.2"}
    with FakeQuire() as fake, GatewayThread(fake.async_client) as gateway:
        reply = gateway.complete(headers=soon)
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        # Nothing has been streamed, so the status can say it as well.
        assert gateway.stream(headers=soon).status == 504


def test_a_place_beyond_the_end_of_the_log_is_told_with_both_of_its_reasons(gateway):
    request_id = gateway.complete().request_id
    reply = gateway.get(f"/v1/requests/{request_id}/events", Last_Event_ID="400")
    assert (reply.status, reply.error["code"], reply.error["kept"]) == (409, "output_rewound", 0)
    assert "either that number is wrong, or Redis lost tokens" in reply.error["message"]
    assert "drop the tokens after the first 0" in reply.error["message"]


def test_a_call_of_a_session_waits_for_the_one_before_it(gateway, fake, script):
    script.pieces = [None, "x"]
    session = {"X-Quire-Session": "user-17"}
    with (
        gateway.stream("a", headers=session) as first,
        gateway.stream("b", headers=session) as second,
    ):
        eventually(lambda: fake.requests, "the first one runs")
        assert fake.connection.zcard(fake.broker.keys.turns) == 2
        assert fake.broker.peek(count=9) == []
        script.release.set()
        assert [first.rest()[-1].data, second.rest()[-1].data] == ["[DONE]", "[DONE]"]
    assert [request.body["prompt"] for request in fake.requests] == ["a", "b"]
    assert {request.session_id for request in fake.requests} == {"user-17"}


def test_a_call_may_say_how_long_it_should_take(gateway, fake):
    assert gateway.complete(headers={"X-Quire-Target-Latency": "2.5"}).status == 200
    assert fake.requests[0].target_latency_ms == 2500
