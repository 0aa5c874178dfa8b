"""Strict functions under `auto` in a worker: constrained, also after a takeover, or refused."""

from typing import Any

import pytest

from quire.wire.constraints import Constraint
from quire.wire.sampling import parse_body
from quire.wire.tools import ToolUse
from service.constraints.strict_calls import CallMarks, call_marks, strict_grammar
from service.model.text import Messages, ModelTokenizer
from tests.quire.wire.test_tools import CITY, function
from tests.service.builders import Queue, StepGate, WorkerThread
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
    grammar = strict_grammar(HERMES, use)
    wanted = Constraint("grammar", grammar, use.strict_field)
    expected = expected_under(wanted, plain_ids(render_chat(ASK)), max_tokens=30)
    request_id = queue.submit(ASK, kind="chat.completions", max_tokens=30, tools=TOOLS)
    gate = StepGate(steps=0)
    settings = queue.settings(drain_seconds=0.0)
    with WorkerThread(settings, before_run=gate, tokenizer=speaking(HERMES)) as one:
        gate.step_until(lambda: queue.published(request_id) >= 4)
        one.worker.stop()
        gate.step_until(lambda: one.has_ended)
    with WorkerThread(queue.settings(), tokenizer=speaking(HERMES)):
        output = queue.result(request_id)
    assert output.token_ids == expected
    assert output.text == text_of(expected)


@pytest.mark.parametrize(
    ("marks", "tools", "message"),
    [
        (None, TOOLS, "cannot be enforced, as this model has no mark"),
        (HERMES, [function("f", strict=True, parameters={"type": "object", "not": {}})], "`not`"),
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
