"""The fields that OpenAI's and vLLM's callers send: each is taken, ignored, or refused by name."""

import json
import re
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.openai.responses.call import call_of
from quire.openai.responses.fields import read_fields
from quire.wire.body_fields import KNOWN_FIELDS, UNSUPPORTED, UNSUPPORTED_IN_RESPONSES
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
        ("cache_salt", ["a"], ["", "x" * 1025, 1]),
        ("truncation_side", ["left", "right"], ["middle", 1, ["left"]]),
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
    for kind, known in KNOWN_FIELDS.items():
        assert not known & UNSUPPORTED[kind].keys()


def test_a_field_of_vectors_that_is_not_supported_is_ignored_only_without_effect() -> None:
    for name, field in UNSUPPORTED["embeddings"].items():
        for value in (None, *field.harmless):
            parse_body("embeddings", {"input": "x", name: value})
        with pytest.raises(InvalidRequest, match=re.escape(field.reason)) as caught:
            parse_body("embeddings", {"input": "x", name: {"another": "value"}})
        assert caught.value.field == f"body.{name}"


def test_a_field_of_responses_that_is_not_supported_is_ignored_only_without_effect() -> None:
    for name, field in UNSUPPORTED_IN_RESPONSES.items():
        for value in (None, *field.harmless):
            read_fields({"input": "x", name: value})
        with pytest.raises(InvalidRequest, match=re.escape(field.reason)) as caught:
            read_fields({"input": "x", name: {"another": "value"}})
        assert caught.value.field == f"body.{name}"


#: The fields of vLLM's requests for a generation.
GENERATION = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p user use_beam_search top_k min_p watermarking
    repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens bad_words
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids echo add_special_tokens
    structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
    guided_json guided_regex guided_choice guided_grammar structural_tag guided_decoding_backend
    guided_whitespace_pattern logits_processors
"""
#: All of them, by the kind of the call.
OF_VLLM = {
    "completions": f"{GENERATION} suffix prompt_embeds best_of",
    "chat.completions": f"""{GENERATION}
        top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort
        include_reasoning add_generation_prompt continue_final_message documents chat_template
        chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    "embeddings": """
        model user input encoding_format dimensions truncate_prompt_tokens padding truncation_side
        request_id priority mm_processor_kwargs cache_salt add_special_tokens messages chat_template
        add_generation_prompt continue_final_message chat_template_kwargs media_io_kwargs normalize
        embed_dtype endianness use_activation
    """,
    "responses": """
        background include input instructions max_output_tokens max_tool_calls metadata model
        logit_bias parallel_tool_calls previous_response_id prompt reasoning service_tier store
        stream temperature text tool_choice tools top_logprobs top_p top_k truncation user
        skip_special_tokens include_stop_str_in_output prompt_cache_key request_id priority
        mm_processor_kwargs cache_salt enable_response_messages previous_input_messages
        previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs
    """,
}


def told_of(kind: Any, name: str) -> str:
    """What the check of a body says of a field with a value that no field can have."""
    body = SUBJECTS.get(kind, {"input": "x"}) | {name: object()}
    try:
        if kind == "responses":
            call_of(body, name="r")
        else:
            parse_body(kind, body)
    except InvalidRequest as error:
        return error.message
    return ""


@pytest.mark.parametrize("kind", OF_VLLM)
def test_no_field_of_vllm_is_unknown(kind: str) -> None:
    told = {name: told_of(kind, name) for name in OF_VLLM[kind].split()}
    assert not [name for name, message in told.items() if "unknown" in message]
    assert "unknown" in told_of(kind, "surprise")
