"""Numbers and texts keep to their schema, whatever its bounds, patterns and constants are."""

import json
import random
import re
from fractions import Fraction
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidRequest
from service.worker.constraints.schemas.patterns import admits_escapes
from tests.service.walks import constraint, text_of, walk
from tests.service.worker.constraints.judged import Judge, refusal_of

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
