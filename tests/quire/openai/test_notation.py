"""What models write as Python does becomes JSON, however it comes; JSON stays as it is."""

import json
import random
from typing import Any

import pytest

from quire.openai.tools.notation import JsonNotation

LETTERS = "aTrueFalseNone'\"\\ux41{}[],: \n\t\0\x7f\x85\u200b\u4e2d\U0001f600\U000e0001"


def text_of(draw: random.Random) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(draw.randrange(9)))


def value_of(draw: random.Random, *, depth: int = 3) -> Any:
    kind = draw.randrange(6 if depth else 4)
    if kind == 4:
        return {text_of(draw): value_of(draw, depth=depth - 1) for _ in range(draw.randrange(4))}
    if kind == 5:
        return [value_of(draw, depth=depth - 1) for _ in range(draw.randrange(4))]
    return [text_of(draw), draw.random(), None, draw.random() < 0.5][kind]


def written(text: str) -> str:
    """By one character at a time; at each of them it is what a single piece gives."""
    notation, found = JsonNotation(), ""
    for index, char in enumerate(text):
        found += notation.feed(char)
        assert found == JsonNotation().feed(text[: index + 1]), text[: index + 1]
    return found


def test_json_stays_as_it_is() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        text = json.dumps(
            value_of(draw), ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1])
        )
        assert written(text) == text


def test_what_python_writes_means_the_same() -> None:
    for seed in range(300):
        value = value_of(random.Random(seed))
        assert json.loads(written(repr(value)), strict=False) == value


@pytest.mark.parametrize(
    "text", ["{foo: 1}", "(1, 2)", "[1,]", "NaN", "Nothing", "Tr", '"\\U00999999"', '"\\xg"', "\\"]
)
def test_what_is_neither_stays_what_it_is(text: str) -> None:
    assert JsonNotation().feed(f"{text} ") == f"{text} "
