"""Requests on the wire: the envelope, the bodies, and the parameters they may carry."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import ExtType

from quire.errors import InvalidRequest, ProtocolError, UnsupportedVersion
from quire.wire.codec import MAX_MAP_LENGTH, pack, unpack
from quire.wire.protocol import (
    GenerationRequest,
    Priority,
    SamplingParams,
    is_tenant_name,
    mint_id,
)
from quire.wire.refusals import validated
from quire.wire.sampling import MAX_BIASED_TOKENS, MAX_STOP_STRINGS, parse_body
from tests.quire.builders import make_request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

integers = st.integers(-(1 << 63), (1 << 64) - 1)

requests = st.builds(
    GenerationRequest,
    id=st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True),
    kind=st.sampled_from(["tokens", "completions", "chat.completions"]),
    body=st.dictionaries(st.text(max_size=10), st.integers(0, 100) | st.none(), max_size=4),
    tenant=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    priority=st.sampled_from(Priority),
    deadline_ms=st.none() | st.integers(1, (1 << 53) - 1),
    idempotency_key=st.none() | st.text(min_size=1, max_size=255),
    headers=st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3),
    metadata=st.dictionaries(st.text(max_size=10), st.none() | integers, max_size=3),
)


@given(requests)
def test_a_request_comes_back_as_it_was(request):
    assert GenerationRequest.decode(request.encode()) == request


@given(st.binary(max_size=100))
def test_bytes_that_are_no_request_raise_a_typed_error(data):
    with pytest.raises((ProtocolError, InvalidRequest)):
        GenerationRequest.decode(data)


@given(st.dictionaries(st.text(max_size=12), st.none() | integers | st.text(), max_size=4))
def test_any_map_in_place_of_a_request_raises_a_typed_error(fields):
    with pytest.raises((ProtocolError, InvalidRequest)):
        GenerationRequest.decode(pack({"v": 1, **fields}))


TENANTS = ["a", "A-1._", "x" * 64]
NO_TENANTS = ["", "x" * 65, "a b", "a:b", "a\n", "\na", "a\nb", "\u00e9", "\u0663", "a\x00"]


def test_a_minted_id_is_new_each_time_and_is_one_that_a_request_may_have():
    minted = [mint_id() for _ in range(1000)]
    assert len(set(minted)) == 1000
    assert make_request(id=minted[0]).id == minted[0]
    assert GenerationRequest(kind="tokens", body={"prompt": [1]}).id not in minted


@pytest.mark.parametrize(
    ("name", "may_be"), [(name, name in TENANTS) for name in TENANTS + NO_TENANTS], ids=ascii
)
def test_a_tenant_is_called_what_the_field_of_a_request_takes(name, may_be):
    """Settings, flags and files ask the rule; a request asks pydantic, by the same pattern."""
    assert is_tenant_name(name) is may_be
    message = pack(unpack(make_request().encode()) | {"tenant": name})
    if may_be:
        assert GenerationRequest.decode(message).tenant == name
    else:
        with pytest.raises(InvalidRequest, match="tenant"):
            GenerationRequest.decode(message)


def test_unknown_fields_of_the_envelope_are_kept_and_passed_on():
    fields = unpack(make_request(id="a").encode()) | {"colour": "blue"}
    decoded = GenerationRequest.decode(pack(fields))
    assert unpack(decoded.encode())["colour"] == "blue"


def test_nulls_inside_the_callers_own_maps_survive():
    request = make_request(metadata={"none": None}, body={"prompt": [1], "seed": None})
    decoded = GenerationRequest.decode(request.encode())
    assert decoded.metadata == {"none": None} and "seed" in decoded.body


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None])
def test_another_major_version_is_refused_before_anything_else(version):
    with pytest.raises(UnsupportedVersion) as caught:
        GenerationRequest.decode(pack({"v": version, "kind": 17}))
    assert caught.value.found == version


def test_a_message_without_a_version_is_not_ours():
    with pytest.raises(ProtocolError, match="no protocol version"):
        GenerationRequest.decode(pack({"id": "a"}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "has space"),
        ("id", ""),
        ("id", "x" * 129),
        ("id", "line\n"),
        ("tenant", "a:b"),
        ("kind", "translations"),
        ("body", [1]),
        ("priority", 4),
        ("priority", "urgent"),
        ("priority", True),
        ("deadline_ms", 0),
        ("deadline_ms", "soon"),
        ("idempotency_key", ""),
        ("headers", {"a": 1}),
        ("metadata", {"a": "x" * 20_000}),
    ],
)
def test_a_wrong_envelope_is_refused_by_the_name_of_the_field(field, value):
    message = unpack(make_request().encode()) | {field: value}
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest.decode(pack(message))
    assert caught.value.field.split(".")[0] == field


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("metadata", {"scores": {1: 0.5}}, "metadata.scores"),
        ("metadata", {"ids": ExtType(1, b"")}, "metadata.ids"),
        ("metadata", dict.fromkeys(map(str, range(MAX_MAP_LENGTH + 1))), "metadata"),
        ("headers", dict.fromkeys(map(str, range(MAX_MAP_LENGTH + 1)), ""), "headers"),
    ],
)
def test_what_no_reader_could_decode_is_refused_where_it_is_made(field, value, path):
    with pytest.raises(InvalidRequest, match="cannot be sent") as caught:
        validated(GenerationRequest, {"kind": "tokens", "body": {"prompt": [1]}, field: value})
    assert caught.value.field == path


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_refused_in_new_metadata_and_read_in_recorded(number):
    metadata = {"scores": [{"row": 1.5, "best": number}]}
    with pytest.raises(InvalidRequest, match="NaN or Infinity: JSON has neither") as caught:
        validated(GenerationRequest, {"kind": "tokens", "body": {}, "metadata": metadata})
    assert caught.value.field == "metadata"
    recorded = pack(unpack(make_request().encode()) | {"metadata": metadata})
    decoded = GenerationRequest.decode(recorded)
    assert decoded.encode() == recorded
    assert repr(decoded.metadata) == repr(metadata)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [1], "logit_bias": {5: 1.0}}, "body.logit_bias"),
        (
            {"messages": [{"role": "user"} | dict.fromkeys(map(str, range(MAX_MAP_LENGTH)))]},
            "body.messages.0",
        ),
        ({"prompt": [1], "user": ExtType(1, b"")}, "body.user"),
    ],
)
def test_a_body_that_no_reader_could_decode_is_not_encoded(body, field):
    with pytest.raises(InvalidRequest, match="cannot be sent") as caught:
        make_request(body=body).encode()
    assert caught.value.field == field


@pytest.mark.parametrize("value", ["high", "HIGH", 2, Priority.HIGH])
def test_a_priority_is_read_by_name_or_number(value):
    assert make_request(priority=value).priority is Priority.HIGH


def test_a_text_a_list_of_ids_and_a_conversation_are_the_three_subjects():
    assert parse_body("completions", {"prompt": "hi"}).prompt == "hi"
    assert parse_body("completions", {"prompt": [1, 2]}).prompt == [1, 2]
    assert parse_body("tokens", {"prompt": [1, 2]}).prompt == [1, 2]
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    parsed = parse_body("chat.completions", {"messages": messages})
    assert parsed.messages == messages and parsed.prompt is None


def test_openai_fields_that_change_no_token_are_accepted():
    body = {
        "prompt": "hi", "model": "abacus", "stream": True, "stream_options": {}, "user": "u",
        "n": 1, "max_completion_tokens": 5, "temperature": None,
    }  # fmt: skip
    parsed = parse_body("completions", body)
    assert (parsed.model, parsed.sampling) == ("abacus", SamplingParams(max_tokens=5))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("tokens", {"top_logprobs": None, "response_format": None, "messages": None}),
        ("completions", {"suffix": None, "echo": None, "best_of": None, "max_tokens": None}),
        ("completions", {"echo": False, "best_of": 1}),
        ("chat.completions", {"tools": None, "metadata": None, "prompt": None, "n": None}),
        ("chat.completions", {"store": False, "service_tier": "auto", "tool_choice": "none"}),
        ("chat.completions", {"tools": [], "functions": [], "function_call": "none"}),
        ("chat.completions", {"modalities": ["text"], "service_tier": "default", "metadata": {}}),
        ("chat.completions", {"logit_bias": None, "stop": None, "n": 1, "audio": None}),
        ("chat.completions", {"user": "u", "safety_identifier": "u", "prompt_cache_key": "u"}),
        ("chat.completions", {"parallel_tool_calls": True}),
        ("chat.completions", {"parallel_tool_calls": False}),
    ],
)
def test_openais_fields_that_say_nothing_are_read_over(kind, fields):
    subject = CHAT if kind == "chat.completions" else {"prompt": [1]}
    assert parse_body(kind, subject | fields) == parse_body(kind, subject)


def test_an_answer_without_a_text_stays_one():
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    assert parse_body("chat.completions", {"messages": said}).messages == said


def test_a_bias_is_keyed_by_token_id_and_travels_under_strings():
    body = {"prompt": [1], "logit_bias": {"5": -100, 7: 2.5}, "allowed_token_ids": [5, 6]}
    sampling = parse_body("tokens", body).sampling
    assert sampling.logit_bias == {5: -100.0, 7: 2.5}
    assert sampling.allowed_token_ids == (5, 6)
    sent = SamplingParams(logit_bias={5: -100, 7: 2.5}, allowed_token_ids=(5, 6)).to_body()
    assert sent == {"logit_bias": {"5": -100.0, "7": 2.5}, "allowed_token_ids": [5, 6]}
    assert parse_body("tokens", {"prompt": [1]} | sent).sampling == sampling


@pytest.mark.parametrize(
    ("kind", "fields", "wanted"),
    [
        ("completions", {}, None),
        ("completions", {"logprobs": None}, None),
        ("completions", {"logprobs": 0}, 0),
        ("completions", {"logprobs": 20}, 20),
        ("chat.completions", {}, None),
        ("chat.completions", {"logprobs": False}, None),
        ("chat.completions", {"logprobs": True}, 0),
        ("chat.completions", {"logprobs": True, "top_logprobs": 3}, 3),
        ("chat.completions", {"logprobs": False, "top_logprobs": None}, None),
        ("chat.completions", SamplingParams(logprobs=3).to_body(), 3),
    ],
)
def test_log_probabilities_are_asked_for_as_in_openais_bodies(kind, fields, wanted):
    subject = CHAT if kind == "chat.completions" else {"prompt": "hi"}
    assert parse_body(kind, subject | fields).sampling.logprobs == wanted


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("tokens", {"prompt": [1], "logprobs": True}, "body.logprobs"),
        ("tokens", {"prompt": [1], "logprobs": -1}, "body.logprobs"),
        ("tokens", {"prompt": [1], "logprobs": 21}, "body.logprobs"),
        ("tokens", {"prompt": [1], "prompt_logprobs": True}, "body.prompt_logprobs"),
        ("tokens", {"prompt": [1], "prompt_logprobs": -1}, "body.prompt_logprobs"),
        ("chat.completions", CHAT | {"prompt_logprobs": 21}, "body.prompt_logprobs"),
        ("tokens", {"prompt": [1], "top_logprobs": 2}, "body.top_logprobs"),
        ("chat.completions", CHAT | {"logprobs": 21}, "body.logprobs"),
        ("chat.completions", CHAT | {"top_logprobs": 2}, "body.top_logprobs"),
        ("chat.completions", CHAT | {"logprobs": False, "top_logprobs": 2}, "body.top_logprobs"),
        ("chat.completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "body.top_logprobs"),
        ("chat.completions", CHAT | {"logprobs": True, "top_logprobs": True}, "body.top_logprobs"),
        ("tokens", {"prompt": [1], "logit_bias": [1]}, "body.logit_bias"),
        ("tokens", {"prompt": [1], "logit_bias": {"five": 1}}, "body.logit_bias.five"),
        ("tokens", {"prompt": [1], "logit_bias": {"-5": 1}}, "body.logit_bias.-5"),
        ("tokens", {"prompt": [1], "logit_bias": {"052": 100, "52": -100}}, "body.logit_bias.052"),
        ("tokens", {"prompt": [1], "logit_bias": {"052": 100}}, "body.logit_bias.052"),
        ("tokens", {"prompt": [1], "logit_bias": {52: 100, "52": -100}}, "body.logit_bias.52"),
        ("tokens", {"prompt": [1], "logit_bias": {"00": 100}}, "body.logit_bias.00"),
        ("tokens", {"prompt": [1], "max_tokens": 1 << 64}, "body.max_tokens"),
        ("tokens", {"prompt": [1], "max_completion_tokens": 1 << 64},
         "body.max_completion_tokens"),
        ("tokens", {"prompt": [1], "max_completion_tokens": 0}, "body.max_completion_tokens"),
        ("tokens", {"prompt": [1], "min_tokens": 1 << 64}, "body.min_tokens"),
        ("tokens", {"prompt": [1], "top_k": 1 << 64}, "body.top_k"),
        ("tokens", {"prompt": [1], "model": ""}, "body.model"),
        ("tokens", {"prompt": [1], "logit_bias": {"9" * 5000: 1}}, "body.logit_bias." + "9" * 64),
        ("tokens", {"prompt": [1], "logit_bias": {"5": 101}}, "body.logit_bias.5"),
        ("tokens", {"prompt": [1], "logit_bias": dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1)},
         "body.logit_bias"),
        ("tokens", {"prompt": [1], "allowed_token_ids": [2, -1]}, "body.allowed_token_ids.1"),
        ("tokens", {"prompt": [1], "max_token": 5}, "body.max_token"),
        ("tokens", {"prompt": [1], "messages": []}, "body.messages"),
        ("tokens", {"prompt": "text"}, "body.prompt"),
        ("tokens", {"prompt": [True]}, "body.prompt"),
        ("tokens", {"prompt": []}, "body.prompt"),
        ("tokens", {}, "body.prompt"),
        ("completions", {"prompt": ""}, "body.prompt"),
        ("completions", {"prompt": ["a", "b"]}, "body.prompt"),
        ("chat.completions", {"messages": []}, "body.messages"),
        ("chat.completions", {"messages": ["hi"]}, "body.messages.0"),
        ("chat.completions", {"messages": [{"content": "hi"}]}, "body.messages.0.role"),
        ("chat.completions", {"messages": [{"role": "user"}]}, "body.messages.0.content"),
        ("chat.completions", {"messages": [{"role": "user", "content": None}]},
         "body.messages.0.content"),
        ("chat.completions", {"messages": [{"role": "assistant"}]}, "body.messages.0.content"),
        ("chat.completions", CHAT | {"tools": [{"type": "function"}]}, "body.tools.0.function"),
        ("chat.completions", CHAT | {"tool_choice": "auto"}, "body.tool_choice"),
        ("chat.completions", CHAT | {"tool_choice": {"type": "none"}}, "body.tool_choice"),
        ("chat.completions", CHAT | {"tools": {}}, "body.tools"),
        ("chat.completions", CHAT | {"functions": [{"name": "f"}]}, "body.functions"),
        ("chat.completions", CHAT | {"function_call": "auto"}, "body.function_call"),
        ("chat.completions", CHAT | {"modalities": ["text", "audio"]}, "body.modalities"),
        ("chat.completions", CHAT | {"metadata": {"a": "b"}}, "body.metadata"),
        ("chat.completions", CHAT | {"service_tier": "scale"}, "body.service_tier"),
        ("chat.completions", CHAT | {"reasoning_effort": 1}, "body.reasoning_effort"),
        ("tokens", {"prompt": [1], "tools": []}, "body.tools"),
        ("chat.completions", CHAT | {"store": True}, "body.store"),
        ("chat.completions", CHAT | {"suffix": False}, "body.suffix"),
        ("completions", {"prompt": "hi", "echo": True}, "body.echo"),
        ("completions", {"prompt": "hi", "echo": 0}, "body.echo"),
        ("completions", {"prompt": "hi", "best_of": 2}, "body.best_of"),
        ("completions", {"prompt": "hi", "best_of": True}, "body.best_of"),
        ("completions", {"prompt": "hi", "suffix": ""}, "body.suffix"),
        ("tokens", {"prompt": [1], "best_of": 1}, "body.best_of"),
        ("tokens", {"prompt": [1], "n": 2}, "body.n"),
        ("tokens", {"prompt": [1], "n": True}, "body.n"),
        ("tokens", {"prompt": [1], "model": 3}, "body.model"),
        ("tokens", {"prompt": [1], "max_tokens": 4, "max_completion_tokens": 5},
         "body.max_completion_tokens"),
        ("tokens", {"prompt": [1], "max_tokens": 0}, "body.max_tokens"),
        ("tokens", {"prompt": [1], "max_tokens": "5"}, "body.max_tokens"),
        ("tokens", {"prompt": [1], "min_tokens": 5, "max_tokens": 4}, "body.min_tokens"),
        ("tokens", {"prompt": [1], "temperature": -0.1}, "body.temperature"),
        ("tokens", {"prompt": [1], "temperature": math.nan}, "body.temperature"),
        ("tokens", {"prompt": [1], "temperature": math.inf}, "body.temperature"),
        ("tokens", {"prompt": [1], "top_p": 0.0}, "body.top_p"),
        ("tokens", {"prompt": [1], "top_k": -2}, "body.top_k"),
        ("tokens", {"prompt": [1], "min_p": 1.5}, "body.min_p"),
        ("tokens", {"prompt": [1], "repetition_penalty": 0}, "body.repetition_penalty"),
        ("tokens", {"prompt": [1], "presence_penalty": 3}, "body.presence_penalty"),
        ("tokens", {"prompt": [1], "seed": 1 << 63}, "body.seed"),
        ("tokens", {"prompt": [1], "stop": [""]}, "body.stop.0"),
        ("tokens", {"prompt": [1], "stop": ["s"] * (MAX_STOP_STRINGS + 1)}, "body.stop"),
        ("tokens", {"prompt": [1], "stop_token_ids": [-1]}, "body.stop_token_ids.0"),
        ("tokens", {"prompt": [1], "ignore_eos": 1}, "body.ignore_eos"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_the_name_of_the_field(kind, body, field):
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, body)
    assert caught.value.field == field


def test_one_stop_string_is_a_list_of_one_and_top_k_of_minus_one_is_off():
    params = SamplingParams(stop="END", top_k=-1)
    assert (params.stop, params.top_k) == (("END",), 0)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 1000),
        temperature=st.floats(0, 10),
        top_p=st.floats(0.01, 1),
        seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        stop=st.lists(st.text(min_size=1, max_size=9), max_size=4),
        ignore_eos=st.booleans(),
    )
)
def test_parameters_written_into_a_body_come_back_as_they_were(params):
    request = make_request(body={"prompt": [1], **params.to_body()})
    assert GenerationRequest.decode(request.encode()).parse_body().sampling == params
