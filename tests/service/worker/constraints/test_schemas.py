"""Schemas are kept to whole, or refused by the keyword and its place; judged by other programs."""

import datetime
import decimal
import enum
import json
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from quire.errors import InvalidRequest
from tests.service.walks import constraint, text_of, walk
from tests.service.worker.constraints.judged import Judge, refusal_of

# -- what excludes itself, what asks nothing, what is refused -------------------------------------


def of_kind(kind: Any, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, **properties},
        "required": ["kind"],
        "additionalProperties": False,
    }


CAT, DOG = of_kind("cat", lives={"type": "integer"}), of_kind("dog", name={"type": "string"})
EXCLUSIVE = {
    "a discriminator": [CAT, DOG],
    "one of enums": [
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"]},
    ],
    "types": [{"type": "integer"}, {"type": ["string", "null"]}],
    "constants": [{"const": 1}, {"const": "1"}, {"const": True}],
    "references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}],
    "nested": [{"oneOf": [CAT, DOG]}, {"anyOf": [{"type": "null"}, of_kind("fish")]}],
}
OVERLAPPING = {
    "patterns": [{"pattern": "a"}, {"pattern": "b"}],
    "the same constant": [{"const": {}}, {"const": {}}],
    "no required property": [
        {"type": "object", "properties": {"kind": {"pattern": name}}} for name in "ab"
    ],
    "closed objects": [
        {"type": "object", "properties": {name: {}}, "additionalProperties": False} for name in "ab"
    ],
}
DEFS = {"$defs": {"cat": CAT, "dog": DOG}}


@pytest.mark.parametrize("branches", EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_one_of_branches_that_exclude_one_another_is_served(branches):
    schema = {"oneOf": branches} | DEFS
    for seed in range(4):
        output, has_ended = walk(constraint("json_schema", schema), seed=seed, longest=400)
        if has_ended:
            jsonschema.validate(json.loads(text_of(output)), schema)


@pytest.mark.parametrize("branches", OVERLAPPING.values(), ids=OVERLAPPING)
def test_one_of_branches_that_may_both_hold_is_refused(branches):
    message = refusal_of({"type": "object", "properties": {"a/b": {"oneOf": branches}}})
    assert message.startswith(
        "`oneOf` at #/properties/a~1b/oneOf cannot be enforced, because one value may match"
        " branches 0 and 1"
    )


NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"minItems": 0, "additionalItems": True},
    {"minProperties": 0, "required": [], "patternProperties": {}},
    {"deprecated": True, "title": "A", "examples": [1], "default": {}, "readOnly": True},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$comment": "c", "$id": "urn:a"},
    {"discriminator": {"propertyName": "kind"}, "x-order": 1, "nullable": True},
    {"not": False},
    {"if": {"type": "array"}},
    {"then": {"type": "null"}, "else": False},
    {"contains": {"type": "null"}, "minContains": 0},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"propertyNames": True, "unevaluatedProperties": True, "unevaluatedItems": {}},
    {"allOf": [], "x-guidance": {"lenient": True}},
    {"format": "password"},
    {"propertyNames": {"type": "string", "description": "a"}},
]


@pytest.mark.parametrize("words", NOTHING, ids=[next(iter(words)) for words in NOTHING])
def test_a_keyword_that_asks_nothing_is_read_over(words):
    judge = Judge({"type": ["array", "string"], "items": {"type": "integer"}} | words)
    assert judge.lets("[1]") and not judge.lets('["a"]')


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"items": {"not": {"pattern": "a"}}}, "`not` at #/items/not cannot be enforced"),
    ({"uniqueItems": True}, "`uniqueItems` at #/uniqueItems cannot be enforced"),
    ({"if": {"pattern": "a"}, "then": {}}, "`if` at #/if cannot be enforced"),
    ({"anyOf": [{}, {"contains": {}}]}, "`contains` at #/anyOf/1/contains cannot be enforced"),
    ({"propertyNames": {"minimum": 1}}, "`propertyNames` at #/propertyNames cannot be enforced"),
    (
        {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
        "`propertyNames` at #/propertyNames cannot be enforced",
    ),
    ({"const": "hello\0there"}, "`const` at #/const must have no control character besides"),
    ({"enum": ["b", ["a\x01"]]}, "`enum` at #/enum must have no control character besides"),
    ({"const": {"a": "\x7f"}}, "`const` at #/const must have no control character besides"),
    ({"$ref": "#/$defs/a"}, "`$ref` at #/$ref refers to nothing in the schema"),
    ({"$ref": "http://a.b/c"}, "`$ref` at #/$ref must point into the schema itself"),
    ({"minLength": -1}, "`minLength` at #/minLength must be a whole number"),
    ({"type": "strin"}, "`type` at #/type must be one or more of array, "),
    ({"properties": []}, "the value at #/properties must be a map of schemas"),
    ({"items": 3}, "the schema at #/items must be a map, true or false"),
    ({"minimum": "1"}, "`minimum` at #/minimum must be a number"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "allows no output that could be enforced"),
    ({"type": "string", "pattern": "(?=a)"}, "has look-around or a boundary"),
    (
        {"type": "object", "properties": {"a": {}}, "maxProperties": 1},
        "has `minProperties` or `maxProperties` beside `properties`",
    ),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_a_refusal_is_one_sentence_with_the_keyword_and_its_path(schema, message):
    assert refusal_of(schema).startswith(message)


OTHERS: list[tuple[str, str, str]] = [
    ("regex", "[a", "has a class that is not closed"),
    ("regex", r"(a)\1", "has a reference to a group, which cannot be enforced"),
    ("regex", "(?=a)b", "has look-around or a boundary, which cannot be enforced"),
    ("regex", "a{4294967296}", "has a repetition that is no range"),
    ("grammar", "start: x", "has no rule or terminal named `x` (line 1, column 8)"),
    ("grammar", "foo", "is not in the syntax of Lark (line 1, column 4)"),
    ("grammar", "start: start", "allows no output that could be enforced"),
    ("grammar", '{"grammars": []}', "is not in the syntax of Lark (line 1, column 1)"),
]


@pytest.mark.parametrize(("kind", "value", "message"), OTHERS)
def test_a_pattern_or_a_grammar_is_refused_in_our_words(kind, value, message):
    with pytest.raises(InvalidRequest) as refused:
        constraint(kind, value)
    assert refused.value.message == message


# -- what pydantic writes -------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(gt=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: Annotated[float, Field(gt=0, lt=1)]


class Tree(BaseModel):
    colour: Colour
    left: "Tree | None"


class Everything(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    maybe: int | None
    at: datetime.datetime
    key: uuid.UUID
    name: Annotated[str, Field(min_length=1, max_length=5, pattern="^[a-z]+$")]
    price: decimal.Decimal
    pair: tuple[int, bool]
    counts: dict[str, int]
    tree: Tree


def test_what_pydantic_writes_for_common_models_is_served_and_read_by_it():
    schema, num_whole = Everything.model_json_schema(), 0
    schema["properties"]["counts"]["maxProperties"] = 2
    for seed in range(3):
        output, has_ended = walk(constraint("json_schema", schema), seed=seed, longest=1500)
        if has_ended:
            num_whole += 1
            jsonschema.validate(json.loads(text_of(output)), schema)
    assert num_whole >= 1


class Unique(BaseModel):
    members: set[int]


@pytest.mark.parametrize("index", ["1" * 5000, "01", "\N{ARABIC-INDIC DIGIT ZERO}", "2"])
def test_a_reference_to_an_item_that_is_not_there_is_refused(index: str):
    schema = {"prefixItems": [True, True], "items": {"$ref": f"#/prefixItems/{index}"}}
    assert "`$ref` at #/items/$ref refers to nothing" in refusal_of(schema)


def test_a_set_is_refused_by_its_path():
    message = refusal_of(Unique.model_json_schema())
    assert message == "`uniqueItems` at #/properties/members/uniqueItems cannot be enforced"
