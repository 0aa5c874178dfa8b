"""Responses over HTTP: created, streamed and retrieved by OpenAI's own client."""

import json
from typing import Any

import openai
import pytest

from quire.errors import RequestFailed
from quire.wire.output import FinishReason
from tests.service.gateway.builders import wait_until_cancelled

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def kinds(events: Any) -> list[str]:
    """The types of events, each run of one type once."""
    told: list[str] = []
    for event in events:
        if told[-1:] != [event.type]:
            told.append(event.type)
    return told


def test_a_response_is_parsed_and_has_every_field_of_its_call(client, fake):
    created = client.responses.create(
        model="fake", input="hello", instructions="Be brief.", metadata={"row": "7"},
        max_output_tokens=40, temperature=0.5, top_p=0.9, user="u", extra_body={"top_k": 5},
    )  # fmt: skip
    assert (created.status, created.output_text) == ("completed", "one two three")
    assert (created.instructions, created.metadata) == ("Be brief.", {"row": "7"})
    assert (created.max_output_tokens, created.temperature, created.top_p) == (40, 0.5, 0.9)
    assert (created.error, created.incomplete_details, created.user) == (None, None, "u")
    assert created.usage.output_tokens == 13
    assert created.usage.total_tokens == created.usage.input_tokens + 13
    assert created._request_id == created.id
    body = fake.requests[0].body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_completion_tokens"], body["top_k"]) == (40, 5)


def test_a_response_is_retrieved_from_any_gateway(client, other):
    created = client.responses.create(model="fake", input="hello")
    assert other.responses.retrieve(created.id) == created


def test_a_stream_has_openais_events_numbered_without_a_gap(client):
    events = list(client.responses.create(model="fake", input="hello", stream=True))
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "one two three"
    assert events[-1].response == client.responses.retrieve(events[0].response.id)


def test_the_clients_own_accumulation_of_a_stream_comes_to_the_same(client):
    with client.responses.stream(model="fake", input="hello") as stream:
        final = stream.get_final_response()
    whole = client.responses.retrieve(final.id)
    assert (final.output_text, final.usage) == (whole.output_text, whole.usage)
    assert [item.id for item in final.output] == [item.id for item in whole.output]


def test_a_stream_is_cut_at_every_event_and_goes_on_at_another_gateway(client, other, told):
    stream = client.responses.create(model="fake", input="hello", stream=True, background=True)
    events = told(stream)
    response_id = events[0]["response"]["id"]
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    for number in range(len(events)):
        again = other.responses.retrieve(response_id, stream=True, starting_after=number)
        assert told(again) == events[number + 1 :]
    assert told(other.responses.retrieve(response_id, stream=True)) == events


def test_events_do_not_depend_on_how_the_log_was_cut_into_entries(client, fake, script, told):
    """In the first log an entry is a piece; the second is written token by token."""
    numbered = []
    for pieces in (["one two", " three"], list("one two three")):
        script.pieces = pieces
        stream = client.responses.create(model="fake", input="hello", stream=True)
        numbered.append([(event["type"], event.get("delta")) for event in told(stream)])
    assert numbered[0] == numbered[1]


def test_a_stream_with_a_last_event_id_goes_on_after_it(gateway):
    body = {"model": "fake", "input": "x", "stream": True}
    events = gateway.ask("POST", PATH, body).events
    response_id = events[0].body["response"]["id"]
    assert events[-1].data == "[DONE]"
    path = f"{PATH}/{response_id}?stream=true"
    again = gateway.get(path, Last_Event_ID=events[4].id).events
    assert [event.data for event in again] == [event.data for event in events[5:]]


def test_an_answer_at_its_limit_is_incomplete(client, script, fake):
    from quire.testing.in_memory import Answer

    fake._worker._answer = lambda _: Answer(["one"], FinishReason.LENGTH)
    created = client.responses.create(model="fake", input="hello", max_output_tokens=3)
    assert (created.status, created.output[0].status) == ("incomplete", "incomplete")
    assert created.incomplete_details.reason == "max_output_tokens"
    assert created.completed_at is None
    stream = client.responses.create(model="fake", input="hello", stream=True)
    assert list(stream)[-1].type == "response.incomplete"


def test_an_empty_output_is_a_message_without_text(client, script):
    script.pieces = [""]
    created = client.responses.create(model="fake", input="hello")
    assert [item.type for item in created.output] == ["message"]
    assert created.output_text == ""


def test_a_failure_before_the_first_token_is_the_status_of_the_answer(
    client, script, patient_status
):
    script.pieces = [RequestFailed("engine_error", "the device is gone")]
    for is_stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.responses.create(model="fake", input="hello", stream=is_stream)


def test_a_failure_after_it_is_the_end_of_the_response(client, script):
    script.pieces = ["one ", RequestFailed("engine_error", "the device is gone")]
    created = client.responses.create(model="fake", input="hello")
    assert (created.status, created.output_text) == ("failed", "one ")
    assert created.error.code == "server_error"
    assert "engine_error: the device is gone" in created.error.message
    events = list(client.responses.create(model="fake", input="hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error == created.error
    assert client.responses.retrieve(created.id) == created


def test_logprobs_come_with_the_deltas_and_with_the_text(client):
    include = ["message.output_text.logprobs"]
    events = list(
        client.responses.create(model="fake", input="x", include=include, stream=True)
    )  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    told = ["".join(one.token for one in event.logprobs) for event in deltas]
    assert told == [event.delta for event in deltas]
    (part,) = events[-1].response.output[0].content
    assert "".join(one.token for one in part.logprobs) == "one two three"


def test_a_response_has_few_enough_logprobs_also_as_a_stream(gateway, fake):
    """Its last events, and its body, have all of them."""
    fields = {"model": "fake", "input": "x", "top_logprobs": 20, "max_output_tokens": 30_000}
    for stream in (False, True):
        reply = gateway.ask("POST", PATH, fields | {"stream": stream})
        assert (reply.status, reply.error["param"]) == (400, "top_logprobs")
        assert reply.error["message"].endswith("a response may have 524288: ask for fewer")
    assert fake.requests == []


def test_a_response_that_is_not_stored_cannot_be_retrieved(client, fake):
    created = client.responses.create(model="fake", input="hello", store=False)
    assert created.output_text == "one two three"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)
    assert b"kept" not in fake.connection.hgetall(fake.broker.keys.request(created.id))


def test_a_repeated_call_with_a_key_joins_the_first_one(client, other, fake):
    key = {"Idempotency-Key": "k"}
    first = client.responses.create(model="fake", input="hello", extra_headers=key)
    again = other.responses.create(model="fake", input="hello", extra_headers=key)
    assert (again, len(fake.requests)) == (first, 1)
    with pytest.raises(openai.UnprocessableEntityError):
        other.responses.create(model="fake", input="other", extra_headers=key)


def test_who_leaves_a_stream_early_ends_its_request(client, fake, script):
    script.pieces = ["one ", None]
    stream = client.responses.create(model="fake", input="x", stream=True)
    response_id = next(stream).response.id
    stream.close()
    wait_until_cancelled(fake, response_id)
    last = list(client.responses.retrieve(response_id, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


def test_a_tenant_does_not_find_the_responses_of_another(start, tmp_path):
    (tmp_path / "keys").write_text("sk-search-7fc1e2b0 search\nsk-archive-90aa51c3 archive\n")
    gateway = start(keys_file=tmp_path / "keys")
    mine, others = ({"Authorization": f"Bearer sk-{name}"} for name in (
        "search-7fc1e2b0", "archive-90aa51c3",
    ))  # fmt: skip
    body = {"model": "fake", "input": "x"}
    response_id = gateway.ask("POST", PATH, body, **mine).body["id"]
    for path in ("", "/input_items"):
        assert gateway.get(f"{PATH}/{response_id}{path}", **mine).status == 200
        assert gateway.get(f"{PATH}/{response_id}{path}", **others).status == 404
    assert gateway.ask("POST", f"{PATH}/{response_id}/cancel", **others).status == 404
    chain = body | {"previous_response_id": response_id}
    assert gateway.ask("POST", PATH, chain, **others).error["code"] == "previous_response_not_found"


def test_structured_text_constrains_the_output(client, fake):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = [
        {"type": "json_schema", "name": "answer", "schema": schema, "strict": True},
        {"type": "json_object"},
        {"type": "text"},
    ]
    for one in formats:
        created = client.responses.create(model="fake", input="x", text={"format": one})
        assert created.text.format.type == one["type"]
    constrained = [request.parse_body().sampling for request in fake.requests]
    assert constrained[0].json_schema == schema
    assert [one.json_object for one in constrained] == [False, True, False]


BAD_FIELDS = [
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input.0.content.0.image_url"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
     "input.0.call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
     "input.0.arguments"),
    ({"instructions": 1}, "instructions"),
    ({"model": "other"}, "model"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"a": "\ud800"}}, "metadata.a"),
    ({"metadata": {"a": "\ud800"}, "store": False}, "metadata.a"),
    ({"instructions": "\ud800"}, "instructions"),
    ({"input": [{"role": "user", "content": "\ud800"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include.0"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "name": "two words"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools.0.parameters"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}},
     "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"stream_options": {}}, "stream_options"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"messages": []}, "messages"),
    ({"nothing_known": 1}, "nothing_known"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f",
                 "arguments": '{"a": ' + "9" * 5000 + "}"}]}, "input.0.arguments"),
]  # fmt: skip


def test_a_bad_field_is_refused_by_its_path(gateway, fake):
    for fields, param in BAD_FIELDS:
        reply = gateway.ask("POST", PATH, {"model": "fake", "input": "x"} | fields)
        assert (reply.status, fields) == (404 if param == "model" else 400, fields)
        assert (reply.error["param"], reply.error["type"]) == (param, "invalid_request_error")
    assert fake.requests == []


BAD_PARAMETERS = {
    "?stream=perhaps": "stream",
    "?stream=true&starting_after=x": "starting_after",
    "/input_items?limit=0": "limit",
    "/input_items?limit=101": "limit",
    "/input_items?order=up": "order",
    "/input_items?after=msg_1": "after",
}


def test_a_bad_parameter_is_refused_by_its_name(gateway):
    response_id = gateway.ask("POST", PATH, {"model": "fake", "input": "x"}).body["id"]
    for path, param in BAD_PARAMETERS.items():
        reply = gateway.get(f"{PATH}/{response_id}{path}")
        assert (reply.status, reply.error["param"]) == (400, param)


def test_an_unknown_response_is_not_found(gateway):
    for name in ("resp_1", "req-" + "0" * 32, "resp_" + "0" * 32, "x" * 300):
        for path in ("", "/input_items", "?stream=true"):
            assert gateway.get(f"{PATH}/{name}{path}").status == 404


def test_what_is_kept_has_a_limit(gateway, fake):
    reply = gateway.ask("POST", PATH, {"model": "fake", "input": "x" * (1 << 20)})
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert fake.requests == []


def test_a_repeated_name_in_json_is_refused(gateway):
    body = json.dumps({"model": "fake"})[:-1] + ', "input": "a", "input": "b"}'
    reply = gateway.ask("POST", PATH, body.encode())
    assert (reply.status, reply.error["param"]) == (400, "input")
