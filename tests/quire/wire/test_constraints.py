"""What a caller may ask an output to be, and what is refused before anything is sent."""

import json
import math
from typing import Any

import pytest

from quire.batch.lines import BadLine, BatchLine, parse_line
from quire.client.client import Client
from quire.errors import InvalidRequest
from quire.testing.in_memory import FakeQuire
from quire.wire import constraints
from quire.wire.constraints import (
    CONSTRAINTS,
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    Constraint,
    checked,
)
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import SamplingParams, parse_body

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
ASKED: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"json_schema": SCHEMA}, SCHEMA),
    "json_object": ({"json_object": True}, True),
    "regex": ({"regex": "[0-9]+"}, "[0-9]+"),
    "choice": ({"choice": ["yes", "no"]}, ("yes", "no")),
    "grammar": ({"grammar": 'start: "a"+'}, 'start: "a"+'),
}


def deep(levels: int) -> dict[str, Any]:
    return {"not": deep(levels - 1)} if levels else {}


def format_of(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def parsed(body: dict[str, Any], *, kind: Any = "completions"):
    return parse_body(kind, {"prompt": "a"} | body)


def test_every_kind_has_an_example_here():
    assert tuple(ASKED) == CONSTRAINTS


@pytest.mark.parametrize("kind", ASKED)
def test_what_is_asked_for_is_found_by_the_worker_word_for_word(kind):
    fields, value = ASKED[kind]
    body = {"prompt": "a"} | SamplingParams(**fields).to_body()
    read = GenerationRequest.decode(GenerationRequest(kind="completions", body=body).encode())
    assert read.parse_body().constraint == Constraint(kind, value, f"body.{kind}")


def test_a_schema_may_be_as_deep_as_it_is_said():
    assert parsed({"json_schema": deep(MAX_SCHEMA_DEPTH - 1)}).constraint is not None


def test_a_schema_keeps_the_order_of_its_properties():
    body = {"prompt": "a", "json_schema": SCHEMA}
    read = GenerationRequest.decode(GenerationRequest(kind="completions", body=body).encode())
    constraint = read.parse_body().constraint
    assert constraint is not None and list(constraint.value["properties"]) == ["b", "a"]


@pytest.mark.parametrize("body", [{}, {"json_object": False}, {"choice": None}, {"regex": None}])
def test_who_asks_for_nothing_has_no_constraint(body):
    assert parsed(body).constraint is None


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"response_format": {"type": "text"}}, None),
    "null": ({"response_format": None}, None),
    "any object": (
        {"response_format": {"type": "json_object"}},
        ("json_object", True),
    ),
    "a schema": (format_of(name="answer", schema=SCHEMA, strict=True), ("json_schema", SCHEMA)),
    "a schema that OpenAI would not enforce": (
        format_of(name="answer", schema=SCHEMA, strict=False, description="an answer"),
        ("json_schema", SCHEMA),
    ),
}


@pytest.mark.parametrize("url_kind", ["completions", "chat.completions"])
@pytest.mark.parametrize(("body", "wanted"), FORMATS.values(), ids=FORMATS)
def test_the_response_format_of_openai_says_the_same(body, wanted, url_kind):
    if url_kind == "chat.completions":
        messages = [{"role": "user", "content": "hi"}]
        found = parse_body(url_kind, {"messages": messages} | body).constraint
    else:
        found = parsed(body).constraint
    assert found == (wanted and Constraint(*wanted, "body.response_format"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two at once": ({"regex": "a", "choice": ["b"]}, "body.choice"),
    "two, one in OpenAI's words": (
        {"regex": "a", "response_format": {"type": "json_object"}},
        "body.response_format",
    ),
    "an end that does not count": ({"regex": "a", "ignore_eos": True}, "body.ignore_eos"),
    "the same in OpenAI's words": (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "body.ignore_eos",
    ),
    "an empty pattern": ({"regex": ""}, "body.regex"),
    "an empty text to choose": ({"choice": ["a", ""]}, "body.choice.1"),
    "one text that is no list": ({"choice": "abc"}, "body.choice"),
    "too many texts": ({"choice": ["a"] * (MAX_CHOICES + 1)}, "body.choice"),
    "a pattern that is too long": ({"regex": "a" * MAX_CONSTRAINT_BYTES}, "body.regex"),
    "texts that are too long": ({"choice": ["a" * 1024] * 80}, "body.choice"),
    "a schema that is too long": (
        {"json_schema": {"enum": ["a" * MAX_SCHEMA_BYTES]}},
        "body.json_schema",
    ),
    "an empty schema": ({"json_schema": {}}, "body.json_schema"),
    "a schema that is a text": ({"json_schema": "{}"}, "body.json_schema"),
    "a schema that is too deep": ({"json_schema": deep(MAX_SCHEMA_DEPTH)}, "body.json_schema"),
    "a schema that is not JSON": ({"json_schema": {"const": math.nan}}, "body.json_schema"),
    "a schema with bytes": ({"json_schema": {"const": b"a"}}, "body.json_schema"),
    "a schema with a key that is none": ({"json_schema": {"const": {1: 2}}}, "body.json_schema"),
    "a schema too wide to be read again": (
        {"json_schema": {"properties": {f"p{n}": {} for n in range(1025)}}},
        "body.json_schema",
    ),
    "half a character": ({"regex": "\ud800"}, "body.regex"),
    "a number that is no truth": ({"json_object": 1}, "body.json_object"),
    "a format that is no map": ({"response_format": "json"}, "body.response_format"),
    "an unknown format": (
        {"response_format": {"type": "xml"}},
        "body.response_format.type",
    ),
    "an unknown field of a format": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "body.response_format.schema",
    ),
    "a format without its schema": (
        {"response_format": {"type": "json_schema"}},
        "body.response_format.json_schema",
    ),
    "a described schema that is none": (
        format_of(name="answer", schema=[]),
        "body.response_format.json_schema.schema",
    ),
    "a described schema without a bottom": (
        format_of(name="answer", schema=deep(900)),
        "body.response_format.json_schema.schema",
    ),
    "an unknown word about a schema": (
        format_of(name="answer", schema=SCHEMA, strictly=True),
        "body.response_format.json_schema.strictly",
    ),
    "strictness that is no truth": (
        format_of(name="answer", schema=SCHEMA, strict="yes"),
        "body.response_format.json_schema.strict",
    ),
}


@pytest.mark.parametrize(("body", "field"), REFUSED.values(), ids=REFUSED)
def test_what_no_worker_could_serve_is_refused_by_the_name_of_its_field(body, field):
    with pytest.raises(InvalidRequest) as refused:
        parsed(body)
    assert refused.value.field == field
    assert refused.value.message


def test_a_prompt_of_ids_has_no_words_of_openai():
    with pytest.raises(InvalidRequest, match=r"body\.response_format: unknown field"):
        parse_body("tokens", {"prompt": [1], "response_format": {"type": "json_object"}})


def test_a_client_is_told_before_anything_is_sent():
    with FakeQuire(lambda request: "yes") as fake, fake.client() as client:
        assert isinstance(client, Client)
        with pytest.raises(InvalidRequest, match=r"sampling\.choice: .* combined with regex"):
            client.submit("a", sampling={"regex": "a", "choice": ["yes"]})
        assert client.submit("a", sampling={"choice": ["yes"]}).result(timeout=10).text == "yes"
    assert [request.body["choice"] for request in fake.requests] == [["yes"]]


def test_a_line_of_a_batch_says_it_in_openais_words():
    def line(**body: Any) -> str:
        fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        return json.dumps(fields | {"body": {"prompt": "a"} | body})

    found = parse_line(line(**format_of(name="answer", schema=SCHEMA)), number=1, batch="b")
    assert isinstance(found, BatchLine)
    constraint = found.call.checked_body().constraint
    assert constraint == Constraint("json_schema", SCHEMA, "body.response_format")
    bad = parse_line(line(response_format={"type": "xml"}), number=7, batch="b")
    assert isinstance(bad, BadLine)
    assert (bad.code, "body.response_format.type" in bad.message) == ("invalid_request", True)


RESTRICTING = {
    "choice": [],
    "allowed_token_ids": [],
    "json_schema": {},
    "regex": "",
    "grammar": "",
}
EMPTY = "must not be empty; leave it out for no restriction"


@pytest.mark.parametrize(("name", "value"), RESTRICTING.items())
def test_what_restricts_and_is_empty_is_refused_and_not_ignored(name, value):
    """In a body, as the gateway and a batch line have it, and in a client's parameters."""
    for others in ({}, {"response_format": {"type": "text"}}):
        with pytest.raises(InvalidRequest) as refused:
            parsed({name: value} | others)
        assert (refused.value.field, refused.value.message) == (f"body.{name}", EMPTY)
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line = parse_line(
        json.dumps(fields | {"body": {"prompt": "a", name: value}}), number=1, batch="b"
    )
    assert isinstance(line, BadLine) and f"body.{name}: {EMPTY}" in line.message
    with FakeQuire(lambda request: "yes") as fake, fake.client() as client:
        with pytest.raises(InvalidRequest, match=rf"sampling\.{name}: must not be empty"):
            client.submit("a", sampling={name: value})
        assert fake.requests == []


@pytest.mark.parametrize("name", [*RESTRICTING, "json_object", "stop", "stop_token_ids"])
def test_null_restricts_nothing(name):
    assert parsed({name: None}).sampling == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", []), ("stop_token_ids", []), ("logit_bias", {}), ("json_object", False)],
)
def test_an_empty_list_of_what_ends_or_biases_is_none(name, value):
    assert parsed({name: value}).sampling == SamplingParams()


@pytest.mark.parametrize("value", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_refused(value):
    with pytest.raises(InvalidRequest, match=r"body\.stop"):
        parsed({"stop": value})


def test_an_empty_schema_beside_a_format_is_not_read_over():
    with pytest.raises(InvalidRequest, match="cannot be combined with json_schema"):
        parsed({"json_schema": {}, "response_format": {"type": "json_object"}})


class Seen(list[Any]):
    """A list that counts how often any of its kind is looked into."""

    looks = 0

    def __iter__(self):
        Seen.looks += 1
        return super().__iter__()


def test_of_a_constraint_with_too_many_values_the_depth_is_not_searched():
    # Each value takes a byte or more.
    wide = {"anyOf": [Seen() for _ in range(MAX_SCHEMA_BYTES)]}
    assert not constraints._is_deeper(wide, MAX_SCHEMA_DEPTH)
    assert Seen.looks == 0
    with pytest.raises(ValueError, match="the limit is 262144"):
        checked(wide)
