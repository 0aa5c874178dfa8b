"""Responses that continue others: chains, function calls and their outputs, input items."""

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALLING = (
    'I shall ask.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
)


def in_pieces(text: str, size: int = 7) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def messages(fake):
    return fake.requests[-1].body["messages"]


def test_a_chain_gives_the_model_the_whole_conversation(client, other, fake, script):
    first = client.responses.create(model="fake", input="one?", instructions="Be brief.")
    script.pieces = ["second answer"]
    second = other.responses.create(model="fake", input="two?", previous_response_id=first.id)
    third = client.responses.create(model="fake", input="three?", previous_response_id=second.id)
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    assert messages(fake) == [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "second answer"},
        {"role": "user", "content": "three?"},
    ]


def test_a_chain_outlives_its_first_response(client, fake):
    first = client.responses.create(model="fake", input="one?")
    second = client.responses.create(model="fake", input="two?", previous_response_id=first.id)
    for key in fake.broker.keys.of_request(first.id):
        fake.connection.delete(key)
    client.responses.create(model="fake", input="three?", previous_response_id=second.id)
    assert messages(fake)[0]["content"] == "one?"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="x", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id"


def test_function_calls_go_round(client, other, fake, script):
    script.pieces = in_pieces(CALLING)
    first = client.responses.create(model="fake", input="Warm in Rome?", tools=[WEATHER])
    message, *calls = first.output
    assert (message.type, first.output_text) == ("message", "I shall ask.")
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({call.call_id for call in calls}) == 2
    assert fake.requests[0].body["tools"][0]["function"]["name"] == "weather"
    script.pieces = ["31 degrees."]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "31"} for call in calls
    ]
    last = other.responses.create(
        model="fake", input=results, tools=[WEATHER], previous_response_id=first.id
    )
    assert last.output_text == "31 degrees."
    user, assistant, *outputs = fake.requests[-1].parse_body().messages
    assert (user["role"], assistant["content"]) == ("user", "I shall ask.")
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"city": "Rome"},
        {"city": "Oslo"},
    ]
    assert [one["tool_call_id"] for one in outputs] == [call.call_id for call in calls]


def test_a_conversation_that_the_caller_keeps_is_the_same_one(client, fake, script):
    """The output items of a response are input items of the next one, as they are."""
    script.pieces = in_pieces(CALLING)
    first = client.responses.create(model="fake", input="Warm?", tools=[WEATHER], store=False)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "31"}
        for item in first.output
        if item.type == "function_call"
    ]
    user = {"role": "user", "content": "Warm?"}
    items = [user, *(item.to_dict() for item in first.output), *outputs]
    client.responses.create(model="fake", input=items, tools=[WEATHER], store=False)
    assert [one["role"] for one in messages(fake)] == ["user", "assistant", "tool", "tool"]


def test_a_stream_with_calls_is_cut_at_every_event(client, other, script, told):
    script.pieces = in_pieces(CALLING)
    stream = client.responses.create(
        model="fake", input="Warm?", tools=[WEATHER], stream=True, background=True
    )
    events = told(stream)
    kinds = [event["type"] for event in events]
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.function_call_arguments.delta") > 10
    response_id = events[0]["response"]["id"]
    for number in range(0, len(events), 3):
        again = other.responses.retrieve(response_id, stream=True, starting_after=number)
        assert told(again) == events[number + 1 :]
    arguments = [event for event in events if event["type"].endswith("arguments.done")]
    whole = other.responses.retrieve(response_id)
    assert [event["arguments"] for event in arguments] == [
        item.arguments for item in whole.output if item.type == "function_call"
    ]


def test_the_clients_own_accumulation_parses_the_calls(client, script):
    script.pieces = in_pieces(CALLING)
    with client.responses.stream(model="fake", input="Warm?", tools=[WEATHER]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def test_a_call_that_was_cut_off_is_not_continued(client, fake, script):
    script.pieces = in_pieces('<tool_call>{"name": "weather", "arguments": {"city": "Ro')
    first = client.responses.create(model="fake", input="Warm?", tools=[WEATHER])
    assert first.output[0].arguments == '{"city": "Ro'
    script.pieces = ["yes"]
    client.responses.create(model="fake", input="So?", previous_response_id=first.id)
    assert [one["content"] for one in messages(fake)] == ["Warm?", "So?"]


def test_the_choice_of_a_function_constrains_the_output(client, fake):
    now = {"type": "function", "name": "now", "parameters": None, "strict": None}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "now"},
    ]}  # fmt: skip
    for choice in ("auto", "required", {"type": "function", "name": "now"}, allowed):
        created = client.responses.create(
            model="fake", input="x", tools=[WEATHER, now], tool_choice=choice
        )
        shown = created.to_dict()["tool_choice"]
        assert shown == choice
        assert [tool.name for tool in created.tools] == ["weather", "now"]
    uses = [request.parse_body().tools for request in fake.requests]
    assert [use.required for use in uses] == [(), ("weather", "now"), ("now",), ("now",)]
    assert uses[3].names == ("now",)


def test_input_items_come_in_pages_of_everything_that_the_model_was_given(client, other):
    first = client.responses.create(model="fake", input=[
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "one?"}]},
    ])  # fmt: skip
    second = client.responses.create(model="fake", input="two?", previous_response_id=first.id)
    newest = list(other.responses.input_items.list(second.id, limit=1))
    oldest = list(other.responses.input_items.list(second.id, limit=3, order="asc"))
    assert [item.id for item in newest] == [item.id for item in reversed(oldest)]
    assert [item.role for item in oldest] == ["developer", "user", "assistant", "user"]
    assert oldest[2].id == first.output[0].id
    page = other.responses.input_items.list(second.id, limit=1)
    assert (page.has_more, page.last_id) == (True, newest[0].id)
    assert page.data[0].content[0].text == "two?"


def test_a_response_that_is_open_or_was_cancelled_cannot_be_continued(client, script):
    script.pieces = [None]
    created = client.responses.create(model="fake", input="x", background=True)
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="y", previous_response_id=created.id)
        assert refused.value.param == "previous_response_id"
        client.responses.cancel(created.id)


def test_a_chain_has_a_limit(gateway):
    """What a response keeps is within the limit of a message, with all earlier items."""
    body = {"model": "fake", "input": "x" * 600_000}
    first = gateway.ask("POST", "/v1/responses", body)
    assert first.status == 200
    chain = body | {"previous_response_id": first.body["id"]}
    reply = gateway.ask("POST", "/v1/responses", chain)
    assert (reply.status, reply.error["param"]) == (400, "input")
