"""Strict functions under `auto` in a worker: constrained, also after a takeover, or refused."""

import json
from typing import Any

import pytest

from quire.openai.tools.answers import message_of
from quire.wire.constraints import Constraint
from quire.wire.sampling import parse_body
from quire.wire.tools import ToolUse
from service.worker.constraints.strict_calls import CallMarks, call_marks, strict_grammar
from service.worker.model.text import Messages, ModelTokenizer
from tests.quire.wire.test_tools import CITY, function
from tests.service.builders import Queue, WorkerThread, left_in_the_middle
from tests.service.fake_model import byte_tokenizer, expected_under, render_chat, text_of
from tests.service.test_chat_takeovers import plain_ids

ASK = [{"role": "user", "content": "1+1="}]
TOOLS = [function("now"), function("weather", parameters=CITY, strict=True)]
HERMES = call_marks("<tool_call>", {})


def speaking(marks: CallMarks | None) -> ModelTokenizer:
    def render(messages: Messages, **_: Any) -> str:
        return render_chat(messages)

    return ModelTokenizer(
        byte_tokenizer(), render_chat=render, variables={"tools"}, call_marks=marks
    )


def test_a_takeover_goes_on_under_the_same_grammar(queue: Queue) -> None:
    assert HERMES is not None
    use = parse_body("chat.completions", {"messages": ASK, "tools": TOOLS}).tools
    assert isinstance(use, ToolUse)
    grammar = strict_grammar(HERMES, use, is_compact=True)
    wanted = Constraint("grammar", grammar, use.strict_field)
    expected = expected_under(wanted, plain_ids(render_chat(ASK)), max_tokens=30)
    request_id = queue.submit(ASK, kind="chat.completions", max_tokens=30, tools=TOOLS)
    left_in_the_middle(queue, request_id, tokenizer=speaking(HERMES))
    with WorkerThread(queue.settings(), tokenizer=speaking(HERMES)):
        output = queue.result(request_id)
    assert output.token_ids == expected
    assert output.text == text_of(expected)


#: The form of the content that an output without calls has.
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"enum": [{"sum": 2}]}}}


#: Each way to ask for it, and a model with marks of calls or without.
ASKED = [
    ({"response_format": FORMAT}, HERMES),
    ({"guided_json": FORMAT["json_schema"]["schema"]}, None),
    ({"structured_outputs": {"json": FORMAT["json_schema"]["schema"]}}, HERMES),
    ({"response_format": {"type": "json_object"}}, None),
]


@pytest.mark.parametrize(
    ("fields", "marks"), ASKED, ids=["a schema", "guided", "structured", "an object"]
)
def test_an_answer_beside_functions_is_of_its_form_or_calls(
    queue: Queue, fields: dict[str, Any], marks: CallMarks | None
) -> None:
    asked = {"tools": TOOLS, "max_tokens": 600, **fields}
    ids = [queue.submit(ASK, kind="chat.completions", seed=seed, **asked) for seed in range(6)]
    told = set()
    with WorkerThread(queue.settings(), tokenizer=speaking(marks)):
        for request_id in ids:
            output = queue.result(request_id)
            assert output.completion.error is None
            if output.completion.finish_reason == "length":
                continue
            message = message_of("r", 0, ["now", "weather"], output.text)
            calls = message.get("tool_calls", [])
            told.add("calls" if calls else "content")
            for call in calls:
                json.loads(call["function"]["arguments"])
            if not calls and "json_object" not in str(fields):
                assert json.loads(message["content"]) == {"sum": 2}
            if not calls:
                assert isinstance(json.loads(message["content"]), dict)
    assert told


def test_a_form_that_cannot_be_enforced_is_refused_by_its_own_field(queue: Queue) -> None:
    schema = {"type": "object", "not": {}}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request_id = queue.submit(ASK, kind="chat.completions", tools=TOOLS, response_format=format_)
    with WorkerThread(queue.settings(), tokenizer=speaking(HERMES)):
        error = queue.result(request_id).completion.error
    assert error is not None and error.field == "body.response_format"


@pytest.mark.parametrize(
    ("marks", "tools", "message"),
    [
        (None, TOOLS, "cannot be enforced, as this model has no mark"),
        (
            HERMES,
            [function("f", strict=True, parameters={"type": "object", "not": {}})],
            "could be enforced",
        ),
    ],
    ids=["no mark", "no schema"],
)
def test_what_cannot_be_enforced_is_refused_by_its_field(
    queue: Queue, marks: CallMarks | None, tools: list[Any], message: str
) -> None:
    request_id = queue.submit(ASK, kind="chat.completions", tools=tools)
    with WorkerThread(queue.settings(), tokenizer=speaking(marks)):
        error = queue.result(request_id).completion.error
    assert error is not None
    assert error.field == f"body.tools.{len(tools) - 1}.function.strict"
    assert message in error.message
