"""Reasoning in responses: items of their own, in streams that are cut, and in the next call."""

import pytest

THINKING = "<think>\nRome is warm.\n</think>\n\nYes, it is."


@pytest.fixture(autouse=True)
def _thinking(script):
    script.pieces = [THINKING[begin : begin + 5] for begin in range(0, len(THINKING), 5)]


def test_reasoning_is_an_item_before_the_message(client):
    created = client.responses.create(model="fake", input="Warm?")
    reasoning, message = created.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text == "Rome is warm."
    assert created.output_text == "Yes, it is."
    counted = created.usage.output_tokens_details.reasoning_tokens
    assert len("Rome is warm.") <= counted <= len("<think>\nRome is warm.\n</think>\n\n")


def test_a_stream_with_reasoning_is_cut_at_every_event(client, other, told):
    stream = client.responses.create(model="fake", input="Warm?", stream=True, background=True)
    events = told(stream)
    deltas = [one["delta"] for one in events if one["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Rome is warm."
    response_id = events[0]["response"]["id"]
    for number in range(0, len(events), 4):
        again = other.responses.retrieve(response_id, stream=True, starting_after=number)
        assert told(again) == events[number + 1 :]


def test_the_effort_goes_to_the_template_and_the_reasoning_into_the_next_call(client, fake):
    first = client.responses.create(model="fake", input="Warm?", reasoning={"effort": "low"})
    client.responses.create(
        model="fake", input="Sure?", previous_response_id=first.id, reasoning={"effort": "none"}
    )
    variables = [request.body["chat_template_kwargs"] for request in fake.requests]
    assert [one["enable_thinking"] for one in variables] == [True, False]
    assert variables[0]["reasoning_effort"] == "low"
    assert fake.requests[1].body["messages"][1] == {
        "role": "assistant",
        "content": "Yes, it is.",
        "reasoning_content": "Rome is warm.",
    }


def test_a_gateway_without_reasoning_leaves_the_marks_in_the_text(start):
    gateway = start(reasoning="none")
    body = gateway.ask("POST", "/v1/responses", {"model": "fake", "input": "Warm?"}).body
    (message,) = body["output"]
    assert message["content"][0]["text"] == THINKING
