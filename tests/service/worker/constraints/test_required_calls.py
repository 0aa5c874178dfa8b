"""Calls that a caller requires: whatever a model would rather say, they are valid."""

import json
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidRequest
from quire.openai.tools.parser import ToolCallParser
from quire.wire.sampling import parse_body
from tests.quire.wire.test_tools import CHAT, CITY, FORESTS, NOW, TREE, WEATHER, function
from tests.service.builders import EOS_ID, byte_tokenizer, expected_tokens
from tests.service.fake_model import expected_under
from tests.service.walks import compiled

PARAMETERS: dict[str, Any] = {"weather": CITY, "plant": TREE, "now": {"type": "object"}}
NUM_SEEDS = 200
MAX_TOKENS = 400


def text_of(tokens: list[int]) -> str:
    return str(byte_tokenizer().decode([one for one in tokens if one != EOS_ID]))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": function("plant")},
        {"tool_choice": function("weather")},
    ],
    ids=["required", "one", "recursive", "named"],
)
def test_every_required_call_parses_and_validates(fields: dict[str, Any]) -> None:
    body = parse_body("chat.completions", CHAT | {"tools": [WEATHER, NOW, FORESTS]} | fields)
    assert body.constraint is not None
    num_complete, names = 0, set()
    for seed in range(NUM_SEEDS // 4):
        tokens = expected_under(body.constraint, (1, 2), max_tokens=MAX_TOKENS, seed=seed)
        if len(tokens) == MAX_TOKENS:
            continue
        num_complete += 1
        text = text_of(tokens)
        said = json.loads(text)
        calls = said if isinstance(said, list) else [said]
        parser = ToolCallParser(PARAMETERS)
        pieces = [*parser.feed(text), *parser.finish()]
        assert [one.text for one in pieces if one.kind == "call"] == [c["name"] for c in calls]
        assert not [one for one in pieces if one.kind == "content"]
        arguments = [json.loads(one.text) for one in pieces if one.kind == "arguments"]
        for call, own in zip(calls, arguments, strict=True):
            assert own == call["arguments"]
            jsonschema.validate(own, PARAMETERS[call["name"]])
            names.add(call["name"])
    assert num_complete > NUM_SEEDS // 8
    assert len(names) == (1 if isinstance(fields["tool_choice"], dict) else 3)


def test_without_the_requirement_the_same_model_calls_nothing() -> None:
    """The control: the calls above are the constraint's."""
    parser = ToolCallParser(PARAMETERS)
    parser.feed(text_of(expected_tokens((1, 2), max_tokens=100, seed=0)))
    assert parser.num_calls == 0


def test_a_value_that_looks_like_a_reference_comes_as_it_is() -> None:
    reference = {"$ref": "#/a"}
    parameters = {
        "properties": {"v": {"const": reference}},
        "required": ["v"],
        "additionalProperties": False,
    }
    tool = function("f", parameters=parameters)
    body = parse_body("chat.completions", CHAT | {"tools": [tool], "tool_choice": function("f")})
    assert body.constraint is not None
    tokens = expected_under(body.constraint, (1, 2), max_tokens=MAX_TOKENS, seed=0)
    assert json.loads(text_of(tokens)) == {"name": "f", "arguments": {"v": reference}}


def test_a_refusal_names_the_function_whose_parameters_cannot_be_enforced() -> None:
    tools = [WEATHER, function("watch", parameters={"properties": {"a": {"format": "regex"}}})]
    body = parse_body("chat.completions", CHAT | {"tools": tools, "tool_choice": "required"})
    assert body.constraint is not None
    with pytest.raises(InvalidRequest) as refused:
        compiled().compile(body.constraint)
    message = "`format` at #/$defs/watch/properties/a/format cannot be enforced"
    assert (refused.value.field, refused.value.message) == ("body.tools", message)


@pytest.mark.parametrize(
    "zod",
    [
        {"type": "integer", "format": "int32"},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"type": "string", "format": "starts_with", "pattern": "^ab.*"},
        {"type": "string", "format": "jwt", "pattern": r"^[\w-]+\.[\w-]+\.[\w-]*$"},
    ],
)
def test_functions_with_annotations_of_common_libraries_can_be_required(zod) -> None:
    tools = [function("f", parameters={"type": "object", "properties": {"a": zod}})]
    body = parse_body("chat.completions", CHAT | {"tools": tools, "tool_choice": "required"})
    assert body.constraint is not None
    compiled().compile(body.constraint)
