"""The fields that OpenAI's and vLLM's callers send: each is taken, ignored, or refused by name."""

import json
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.wire.body_fields import KNOWN_FIELDS, UNSUPPORTED
from quire.wire.sampling import ParsedBody, parse_body

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
PROMPT: dict[str, Any] = {"prompt": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAID = {"role": "assistant", "content": "So"}
SUBJECTS = {"chat.completions": CHAT, "completions": PROMPT}
BOTH = pytest.mark.parametrize("kind", ["chat.completions", "completions"])


def parsed(kind: Any = "chat.completions", **fields: Any) -> ParsedBody:
    return parse_body(kind, SUBJECTS[kind] | fields)


def fault(kind: Any = "chat.completions", **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parsed(kind, **fields)
    return str(caught.value).removeprefix("body.")


@BOTH
@pytest.mark.parametrize(
    ("fields", "name", "value", "path"),
    [
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b"), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA,
         "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", True,
         "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a"], "disable_fallback": False}}, "choice", ("a",),
         "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_a_constraint_of_vllms_fields_is_one_of_ours(
    kind: str, fields: dict[str, Any], name: str, value: Any, path: str
) -> None:
    body = parsed(kind, **fields)
    assert getattr(body.sampling, name) == value
    assert body.constraint is not None
    assert (body.constraint.kind, body.constraint.field) == (name, f"body.{path}")


@BOTH
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": 5}, "guided_json: must "),
        ({"guided_json": "{"}, "guided_json: is not"),
        ({"guided_json": '{"a": NaN}'}, "guided_json.a: must be a finite number"),
        ({"guided_json": {}}, "guided_json: must not be empty"),
        ({"guided_choice": ["a", 1]}, "guided_choice.1: must be"),
        ({"guided_regex": ""}, "guided_regex: must not be empty"),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex: cannot be combined with regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}},
         "response_format: cannot be combined with guided_regex"),
        ({"structured_outputs": []}, "structured_outputs: must be a map"),
        ({"structured_outputs": {}}, "structured_outputs: must have one of json,"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}},
         "structured_outputs: must have one of json,"),
        ({"structured_outputs": {"structural_tag": "x"}},
         "structured_outputs.structural_tag: is not supported"),
        ({"structured_outputs": {"json": {"a": {1: 2}}}}, "structured_outputs.json: cannot be"),
        ({"structured_outputs": {"regex": "a"}, "json_object": True},
         "structured_outputs.regex: cannot be combined with json_object"),
    ],
)  # fmt: skip
def test_a_wrong_constraint_is_refused_by_the_field_that_the_caller_wrote(
    kind: str, fields: dict[str, Any], message: str
) -> None:
    assert fault(kind, **fields).startswith(message)


def test_what_says_how_the_template_renders_is_taken_from_chats() -> None:
    assert parsed().template_settings == {}
    assert parsed(add_generation_prompt=True).template_settings == {}
    assert parsed(add_generation_prompt=False).template_settings == {"add_generation_prompt": False}
    messages = [*CHAT["messages"], SAID]
    continued = parsed(messages=messages, continue_final_message=True).template_settings
    assert continued == {"continue_final_message": True, "add_generation_prompt": False}
    documents = [{"title": "a", "text": "b"}]
    assert parsed(documents=documents).template_settings == {"documents": documents}
    assert parsed(reasoning_effort="low").template_settings == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [SAID], "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ({"documents": []}, "documents"),
        ({"documents": [{"text": "a"}] * 1025}, "documents"),
        ({"documents": [{"text": "a"}, {"text": 1}]}, "documents.1"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning_effort": "x" * 33}, "reasoning_effort"),
        ({"include_reasoning": 1}, "include_reasoning"),
    ],
)  # fmt: skip
def test_wrong_settings_of_the_template_are_refused_by_their_path(
    fields: dict[str, Any], path: str
) -> None:
    assert fault(**fields).split(":")[0] == path


@BOTH
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("truncate_prompt_tokens", [1, 9], [0, -1, True, 1.5, "1", 1 << 40]),
        ("cache_salt", ["a"], ["", "x" * 257, 1]),
        ("return_token_ids", [True, False], [1, "yes"]),
        ("service_tier", ["auto", "default", "flex", "priority"], ["scale", 1, []]),
    ],
)
def test_options_of_a_call_have_their_ranges(
    kind: str, name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in [None, *good]:
        parsed(kind, **{name: value})
    for value in bad:
        assert fault(kind, **{name: value}).split(":")[0] == name


def test_the_options_reach_the_parsed_body() -> None:
    body = parsed(truncate_prompt_tokens=7, cache_salt="s")
    assert (body.max_prompt_tokens, body.cache_salt) == (7, "s")
    assert (parsed().max_prompt_tokens, parsed().cache_salt) == (None, "")


@BOTH
def test_a_field_that_is_not_supported_is_ignored_only_with_a_value_without_effect(
    kind: str,
) -> None:
    for name, field in UNSUPPORTED[kind].items():
        for value in (None, *field.harmless):
            parsed(kind, **{name: value})
        told = fault(kind, **{name: {"another": "value"}})
        assert told.startswith(f"{name}: {field.reason}: leave it out"), told


def test_no_field_is_both_taken_and_refused() -> None:
    for kind, unsupported in UNSUPPORTED.items():
        assert not KNOWN_FIELDS[kind] & unsupported.keys()
