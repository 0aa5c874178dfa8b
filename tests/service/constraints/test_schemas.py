"""Schemas are kept to whole, or refused by the keyword and its place; judged by other programs."""

import datetime
import decimal
import enum
import json
import random
import re
import uuid
from fractions import Fraction
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.constraints.patterns import admits_escapes
from tests.service.walks import compiled, constraint, pair_tokenizer, text_of, walk


class Judge:
    """Whether whole texts are outputs that a schema's constraint lets come."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._matcher = compiled().compile(Constraint("json_schema", schema, "body.json_schema"))

    def lets(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        tokens = pair_tokenizer().encode(text).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal_of(schema: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        compiled().compile(Constraint("json_schema", schema, "body.json_schema"))
    assert refused.value.field == "body.json_schema"
    assert "\n" not in refused.value.message
    return refused.value.message


# -- numbers --------------------------------------------------------------------------------------


def some_bound(chance: random.Random) -> float:
    kind = chance.random()
    if kind < 0.3:
        return chance.choice([0, 1, -1, 10, -10, 99, 0.5])
    if kind < 0.6:
        return chance.randint(-120, 120)
    return round(chance.uniform(-2, 2), chance.choice([1, 2, 3]))


def keeps_to(number: Fraction, schema: dict[str, Any]) -> bool:
    def bound(name: str) -> Fraction:
        return Fraction(str(schema[name]))

    rules = {
        "minimum": lambda: number >= bound("minimum"),
        "maximum": lambda: number <= bound("maximum"),
        "exclusiveMinimum": lambda: number > bound("exclusiveMinimum"),
        "exclusiveMaximum": lambda: number < bound("exclusiveMaximum"),
        "multipleOf": lambda: (number / bound("multipleOf")).denominator == 1,
        "type": lambda: schema["type"] == "number" or number.denominator == 1,
    }
    return all(rules[name]() for name in schema)


def texts_near(bounds: list[float]) -> set[str]:
    steps = ("0", "1", "-1", ".1", "-.1", ".01", "-.01", ".001", "-.001", ".5", "-.5")
    near = {Fraction(str(bound)) + Fraction(step) for bound in [*bounds, 0] for step in steps}
    plain = {repr(float(one)).removesuffix(".0") for one in near}
    return plain | {f"{one}0" if "." in one else f"{one}.0" for one in plain} | {"-0", "-0.0"}


@pytest.mark.parametrize("seed", range(6))
def test_no_number_beyond_its_bounds_comes_whatever_the_bounds_are(seed: int):
    chance, num_judged = random.Random(seed), 0
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    while num_judged < 60:
        bounds = {name: some_bound(chance) for name in names if chance.random() < 0.45}
        schema: dict[str, Any] = {"type": chance.choice(["number", "number", "integer"])} | bounds
        if chance.random() < 0.2:
            schema["multipleOf"] = chance.choice([1, 2, 5, 0.5, 0.25, 0.1, 1.5])
        try:
            judge = Judge(schema)
        except InvalidRequest:
            assert refusal_of(schema) == "allows no output that could be enforced"
            continue
        num_judged += 1
        for text in texts_near(list(bounds.values())):
            if judge.lets(text):
                assert keeps_to(Fraction(text), schema), (schema, text)
            elif "." not in text and text != "-0":
                assert not keeps_to(Fraction(text), schema), (schema, text)


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"exclusiveMinimum": 1, "exclusiveMaximum": 1.9},
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"allOf": [{"exclusiveMaximum": -1}], "minimum": -1.1},
    ],
)
def test_an_exclusive_bound_holds_where_the_other_is_less_than_one_away(bounds):
    schema = {"type": "number"} | bounds
    for seed in range(10):
        output, has_ended = walk(constraint("json_schema", schema), seed=seed, longest=60)
        if has_ended:
            jsonschema.validate(json.loads(text_of(output)), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 9007199254740993},
        {"enum": [[{"a": -9007199254740993}]]},
        {"type": "integer", "minimum": 10**19},
    ],
)
def test_a_number_whose_digits_would_be_lost_is_refused(schema):
    assert "2^53" in refusal_of(schema)


# -- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a\nb\t\b\f\r", {"a\x01\n": [1, "\x80\u2028"]}, ["", '\\"/']])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_constant_comes_as_it_is_with_its_control_characters(keyword: str, value: Any):
    schema = {keyword: value if keyword == "const" else [value]}
    output, has_ended = walk(constraint("json_schema", schema), seed=1)
    assert has_ended and json.loads(text_of(output)) == value


@pytest.mark.parametrize("name", ["a\x01b", "\0", "a\n"])
def test_a_name_comes_as_it_is_with_its_control_characters(name: str):
    schema = {"type": "object", "required": [name], "maxProperties": 1}
    for more in ({"properties": {name: {"const": 1}}}, {"additionalProperties": {"const": 1}}):
        output, has_ended = walk(constraint("json_schema", schema | more), seed=1)
        assert has_ended and json.loads(text_of(output)) == {name: 1}


# -- patterns -------------------------------------------------------------------------------------

PARTS = ["a-z", "0-9", '"', r"\\", r"\n", r"\t", r"\x08", r"\x00-\x1f", r"\s", r"\w", r"\S", " "]
FORMS = ["^%s{1,3}$", "^%s+$", "%s", "^a%sb?$", "^%s*x$", "^(%s|ab)$"]
LETTERS = list('az0"\\\n\t\r\f\b /')


@pytest.mark.parametrize("seed", range(4))
def test_no_text_that_its_pattern_does_not_match_comes(seed: int):
    chance, num_judged = random.Random(seed), 0
    texts = [*LETTERS, *(one + other for one in LETTERS for other in 'a"\\')]
    while num_judged < 60:
        parts = "".join(chance.sample(PARTS, chance.randint(1, 3)))
        pattern = chance.choice(FORMS) % f"[{chance.choice(['', '^'])}{parts}]"
        schema = {"type": "string", "pattern": pattern}
        if chance.random() < 0.3:
            schema |= {"minLength": 1, "maxLength": 2}
        try:
            judge = Judge(schema)
        except InvalidRequest:
            continue
        num_judged += 1
        for text in texts:
            is_right = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
            is_right &= len(text) <= schema.get("maxLength", 9)
            if judge.lets(json.dumps(text)):
                assert is_right, (schema, text)
            elif not admits_escapes(pattern) or text.isalnum():
                assert not is_right, (schema, text)


def test_an_escaped_quotation_mark_is_a_quotation_mark():
    judge = Judge({"type": "string", "pattern": '^[^"]{1,3}$'})
    assert not judge.lets(r'"\""') and not judge.lets(r'"a\""')
    assert judge.lets('"abc"')
    # The controls: a pattern that has it, and a text without a pattern.
    assert Judge({"type": "string", "pattern": '^["a]+$'}).lets(r'"a\""')
    assert Judge({"type": "string"}).lets(r'"\""')


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[\x00-\x7f&&[^"\\]]{1,3}$',
        r'^[\x00-\x7f--["\\]]{1,3}$',
        r'^[\x00-\x7f~~["\\]]{1,3}$',
        r'^[]\]\x00-\x7f&&[^"\\]]{1,3}$',
    ],
)
def test_a_class_with_set_operations_lets_no_escape_in_that_it_excludes(pattern: str):
    judge = Judge({"type": "string", "pattern": pattern})
    assert judge.lets('"ab]"')
    assert not judge.lets(r'"\""') and not judge.lets(r'"\\"')


def test_keys_with_such_a_pattern_are_refused():
    schema = {"type": "object", "patternProperties": {'^[^"]$': {"type": "integer"}}}
    assert "`patternProperties` at #/patternProperties" in refusal_of(schema)


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
    "a number is an integer": [{"type": "integer"}, {"type": "number"}],
    "the same constant": [{"const": 1}, {"const": 1.0}],
    "no required property": [
        {"type": "object", "properties": {"kind": {"const": name}}} for name in "ab"
    ],
    "no types": [{"properties": {"a": {"const": n}}, "required": ["a"]} for n in range(2)],
    "anything": [{}, {"type": "null"}],
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
]


@pytest.mark.parametrize("words", NOTHING, ids=[next(iter(words)) for words in NOTHING])
def test_a_keyword_that_asks_nothing_is_read_over(words):
    judge = Judge({"type": ["array", "string"], "items": {"type": "integer"}} | words)
    assert judge.lets("[1]") and not judge.lets('["a"]')


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"items": {"not": {"type": "null"}}}, "`not` at #/items/not cannot be enforced"),
    ({"uniqueItems": True}, "`uniqueItems` at #/uniqueItems cannot be enforced"),
    ({"if": {}, "then": {}}, "`if` at #/if cannot be enforced"),
    ({"anyOf": [{}, {"contains": {}}]}, "`contains` at #/anyOf/1/contains cannot be enforced"),
    ({"format": "iri"}, "`format` at #/format cannot be enforced; these can: date, "),
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
