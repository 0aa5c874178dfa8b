"""Keywords that are written as other ones allow what they allow themselves, by another program."""

import json
import random
import time
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidRequest
from service.worker.constraints.schemas.checks import SchemaRefused
from service.worker.constraints.schemas.rewriting import enforceable
from tests.service.walks import constraint, text_of, walk
from tests.service.worker.constraints.judged import Judge, refusal_of


@pytest.mark.parametrize(
    "names",
    [
        {"pattern": "^[a-c]+$"},
        {"enum": ["b", "cab", 3]},
        {"const": "b"},
        {"minLength": 1, "maxLength": 3},
        {"enum": ["b", "x", "abcd"], "pattern": "^[a-c]+$"},
        {"$ref": "#/$defs/names"},
    ],
)
@pytest.mark.parametrize("beside", [{}, {"properties": {"b": {"const": 1}, "x": {}}}])
def test_names_that_their_schema_excludes_do_not_come(names, beside):
    schema = {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": names,
        "$defs": {"names": {"type": "string", "title": "N", "enum": ["b", "abcd"]}},
    } | beside
    judge, validator = Judge(schema), jsonschema.Draft202012Validator(schema)
    for name in ("", "b", "cab", "abcd", "x"):
        for value in (1, 2, None):
            is_valid = validator.is_valid({name: value})
            assert judge.lets(json.dumps({name: value})) == is_valid, (name, value)


VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        1.5,
        "",
        "a",
        "ab",
        "foo",
        'b"',
        "-",
        "~",
        "]",
        [],
        [1],
        ["a"],
        [1, "a"],
    ),
    *({}, {"a": 1}, {"b": 1}, {"a": 1, "b": "a"}, {"a": "x", "b": None}, {"c": 1}),
]
#: Keywords, with the number of schemas that they need and the schema that they make of these.
MADE: list[tuple[int, Callable[..., dict[str, Any]]]] = [
    (1, lambda one: {"not": one}),
    (1, lambda one: {"properties": {"a": one}}),
    (1, lambda one: {"prefixItems": [one]}),
    (1, lambda one: {"dependentSchemas": {"a": one}}),
    (2, lambda *all_: {"oneOf": all_}),
    (3, lambda *all_: {"oneOf": all_}),
    (2, lambda *all_: {"anyOf": all_}),
    (2, lambda *all_: {"allOf": all_}),
    (2, lambda one, other: {"if": one, "then": other}),
    (3, lambda one, other, third: {"if": one, "then": other, "else": third}),
]
PLAIN: list[Any] = [
    {"type": "object"},
    {"type": ["string", "null"]},
    {"type": "number"},
    {"type": "array", "minItems": 1},
    {"const": "a"},
    {"enum": ["a", "ab", 'b"', 1, None]},
    {"enum": [0, 1.5, True, ""]},
    {"required": ["a"]},
    {"required": ["b", "a"], "type": "object"},
    {"properties": {"b": {"const": 1}}, "required": ["b"]},
    {"dependentRequired": {"a": ["b"], "c": []}},
    {"minLength": 2},
    {"maxLength": 1, "maxItems": 1},
    {"minimum": 1, "exclusiveMaximum": 2},
    {"propertyNames": {"enum": ["a"]}},
    True,
    False,
]


def drawn(chance: random.Random, depth: int) -> Any:
    if depth == 0 or chance.random() < 0.25:
        return chance.choice(PLAIN)
    number, make = chance.choice(MADE)
    return make(*(drawn(chance, depth - 1) for _ in range(number)))


@pytest.mark.parametrize("seed", range(4))
def test_what_another_program_excludes_does_not_come_and_everything_else_may(seed: int):
    chance, num_served = random.Random(seed), 0
    while num_served < 40:
        schema = drawn(chance, 3)
        if not isinstance(schema, dict):
            continue
        validator = jsonschema.Draft202012Validator(schema)
        valid = [one for one in VALUES if validator.is_valid(one)]
        try:
            judge = Judge(schema)
        except InvalidRequest:
            continue
        num_served += 1
        assert [one for one in VALUES if lets_in_any_order(judge, one)] == valid, schema


def lets_in_any_order(judge: Judge, value: Any) -> bool:
    orders = [dict(one) for one in permutations(value.items())] if type(value) is dict else [value]
    return any(judge.lets(json.dumps(one, separators=(",", ":"))) for one in orders)


SERVED: list[dict[str, Any]] = [
    {"not": {"const": "a"}},
    {"not": {"required": ["a", "b"]}},
    {"not": {"type": ["string", "object"]}},
    {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"not": {"$ref": "#/$defs/one"}},
    {"not": {"not": {"$ref": "#/$defs/one"}}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"required": [name]} for name in "abcd"], "type": "object"},
    {"oneOf": [{"properties": {"a": {"const": name}}} for name in ("x", 1)]},
    {"oneOf": [{}, {"type": "null"}]},
    {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
    # Branches of which each has a property, or a size, that the other one excludes.
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {name: {"format": "a", "pattern": ""}},
                "required": [name],
                "additionalProperties": False,
            }
            for name in "ab"
        ]
    },
    {"oneOf": [{"type": "string", "maxLength": 1}, {"minLength": 2, "pattern": "^f"}]},
    {"oneOf": [{"type": "array", "maxItems": 1, "items": {"type": "integer"}}, {"minItems": 2}]},
    {
        "oneOf": [
            {"type": "number", "minimum": 2},
            {"type": "number", "maximum": 1, "multipleOf": 1},
        ]
    },
    {"not": {"enum": [*"#$%&()*+,-./:;<=>?@[]^_`{|}~"]}},
    {"not": {"maxLength": 1, "format": "a thing"}},
    {"minProperties": 1, "type": "object"},
    {"minProperties": 1, "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    {"minProperties": 2, "required": ["a"], "properties": {"a": {}, "b": {"type": "string"}}},
    {"minProperties": 2, "required": ["a", "b"], "properties": {"a": {}, "c": {}}},
    {"minProperties": 1, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
    {"dependencies": {"a": ["b"]}},
    {"dependencies": {"a": {"properties": {"b": {"type": "string"}}}}},
    {"dependentRequired": {"a": ["b"]}},
]


@pytest.mark.parametrize("schema", SERVED)
def test_common_conditions_are_served_exactly(schema: dict[str, Any]):
    schema = schema | {"$defs": {"one": {"type": "object", "minProperties": 1}}}
    # The draft that has all of these keywords.
    validator = (
        jsonschema.Draft7Validator
        if "dependencies" in schema
        else (jsonschema.Draft202012Validator)
    )
    valid = [one for one in VALUES if validator(schema).is_valid(one)]
    judge = Judge(schema)
    assert [one for one in VALUES if lets_in_any_order(judge, one)] == valid


def test_what_cannot_be_said_without_a_keyword_is_refused():
    unsayable: list[dict[str, Any]] = [
        {"pattern": "a"},
        {"multipleOf": 3},
        {"const": {}},
        {"const": "a" * 101},
        {"maxProperties": 1},
        {"required": [1]},
        {"minLength": "1"},
        {"$ref": "#anchor"},
        {"$ref": "other.json"},
    ]
    for schema in unsayable:
        assert refusal_of({"items": {"not": schema}}) == "`not` at #/items/not cannot be enforced"
        condition = {"if": schema, "then": {"type": "string"}}
        assert refusal_of(condition) == "`if` at #/if cannot be enforced"


def test_a_complement_that_doubles_at_each_reference_is_refused_soon():
    names = [f"d{n}" for n in range(14)]
    definitions: dict[str, Any] = {
        name: {"allOf": [{"$ref": f"#/$defs/{after}"}, {"$ref": f"#/$defs/{after}"}]}
        for name, after in pairwise(names)
    }
    definitions[names[-1]] = {"type": "string"}
    schema = {"not": {"$ref": "#/$defs/d0"}, "$defs": definitions}
    began = time.process_time()
    assert refusal_of(schema) == "`not` at #/not cannot be enforced"
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("keyword", ["oneOf", "not"])
def test_references_that_multiply_at_each_level_cost_bounded_time(keyword: str):
    definitions: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 50} for n in range(7)
    }
    all_ = {"$ref": "#/$defs/d0"}
    schema = {keyword: [all_, {"type": "integer"}] if keyword == "oneOf" else all_}
    began = time.process_time()
    with pytest.raises(SchemaRefused, match="cannot be enforced"):
        enforceable(schema | {"$defs": definitions | {"d7": {"type": "string"}}})
    assert time.process_time() - began < 5.0


def test_a_least_number_of_properties_that_could_be_one_property_twice_is_refused():
    judge = Judge({"minProperties": 2, "required": ["a"], "type": "object"})
    assert judge.lets('{"a":1,"b":2}') and not judge.lets('{"a":1,"a":1}')
    message = "`minProperties` at #/items/minProperties cannot be enforced"
    assert refusal_of({"items": {"minProperties": 2, "additionalProperties": {}}}) == message


def test_branches_that_all_overlap_are_refused_when_they_are_many():
    branches = [{"required": [f"p{n}"]} for n in range(40)]
    message = refusal_of({"type": "object", "oneOf": branches})
    assert message.startswith("`oneOf` at #/oneOf cannot be enforced")


def test_properties_come_in_the_order_of_the_caller():
    numbers = {name: {"type": "integer"} for name in "dcba"}
    schema = {
        "type": "object",
        "oneOf": [{"required": ["a"]}, {"required": ["x"]}],
        "not": {"required": ["y"]},
        "dependentRequired": {"a": ["b"]},
        "properties": numbers,
        "required": ["d", "a", "c"],
        "additionalProperties": False,
    }
    output, has_ended = walk(constraint("json_schema", schema), seed=1)
    assert has_ended and list(json.loads(text_of(output))) == ["d", "c", "b", "a"]
