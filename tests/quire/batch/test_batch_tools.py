"""Lines of a batch whose outputs call functions, and what lines of chats keep."""

import json

from quire.batch.lines import BatchLine, output_line, parse_line, response_body
from quire.batch.progress import TokenCounts
from quire.wire.output import FinishReason
from tests.quire.builders import make_completion

TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def line_of(**fields: object) -> BatchLine:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    parsed = parse_line(json.dumps(line), number=1, batch="b")
    assert isinstance(parsed, BatchLine), parsed
    return parsed


def choice_of(line: BatchLine, text: str) -> dict[str, object]:
    completion = make_completion("batch-x", text=text, finish_reason=FinishReason.EOS)
    written = output_line(line, completion.request_id, response_body(line, [completion]))
    (choice,) = json.loads(written)["response"]["body"]["choices"]
    return dict(choice)


def test_the_output_line_has_the_calls() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    choice = choice_of(line_of(tools=TOOLS), text)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert isinstance(message, dict) and message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice_of(line_of(tools=TOOLS), text) == choice
    # The control: nothing was declared.
    assert choice_of(line_of(), text)["message"] == {"role": "assistant", "content": text}


def test_the_last_of_many_functions_has_the_types_of_its_arguments() -> None:
    parameters = {"properties": {f"a_longer_name_{n}": {"type": "string"} for n in range(6)}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": parameters}}
        for n in range(80)
    ]
    call = "<arg_key>a_longer_name_5</arg_key><arg_value>123</arg_value></tool_call>"
    message = choice_of(line_of(tools=tools), f"<tool_call>f79{call}")["message"]
    assert isinstance(message, dict)
    (told,) = message["tool_calls"]
    assert told["function"]["arguments"] == '{"a_longer_name_5": "123"}'


def test_a_line_with_a_wrong_function_is_bad() -> None:
    wrong = {"custom_id": "a", "url": "/v1/chat/completions",
             "body": {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}}  # fmt: skip
    bad = parse_line(json.dumps(wrong), number=1, batch="b")
    assert not isinstance(bad, BatchLine) and "body.tools.0.type" in bad.message


def test_the_tokens_of_lines_are_added_up_with_those_that_are_reasoning() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    thought = {"completion_tokens_details": {"reasoning_tokens": 3}}
    total = TokenCounts.of(usage) + TokenCounts.of(usage | thought)
    assert total == TokenCounts(14, 8, 10, 3)


def test_the_metadata_of_a_line_is_in_its_answer() -> None:
    line = line_of(metadata={"row": "7"}, store=True)
    completion = make_completion("batch-x", text="x", finish_reason=FinishReason.EOS)
    assert response_body(line, [completion])["metadata"] == {"row": "7"}
    assert "metadata" not in response_body(line_of(), [completion])


def test_a_line_with_wrong_metadata_is_bad() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "metadata": {"row": 7}}
    wrong = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    bad = parse_line(json.dumps(wrong), number=1, batch="b")
    assert not isinstance(bad, BatchLine) and "body.metadata.row" in bad.message
