"""A wrong field is told in our words, with the name that was meant."""

import pytest

from quire.errors import InvalidRequest
from quire.wire.arguments import build_request
from quire.wire.protocol import GenerationRequest
from quire.wire.refusals import MAX_COMPARED_PAIRS, nearest, validated
from quire.wire.sampling import SamplingParams, parse_body


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temprature": 1}, "temprature: unknown field; did you mean temperature?"),
        ({"colour": 1}, "colour: unknown field"),
        ({"maxTokens": 1}, "maxTokens: unknown field; did you mean max_tokens?"),
        ({"sotp": "x"}, "sotp: unknown field; did you mean stop?"),
        ({"presence": 1}, "presence: unknown field; did you mean presence_penalty?"),
        ({"echo": True}, "echo: unknown field"),
        ({"store": True}, "store: unknown field"),
        ({"input": "x"}, "input: unknown field"),
        ({"stop": 5}, "stop: must be a string or a list of strings"),
        ({"stop": [5]}, "stop.0: must be a valid string"),
        ({"choice": "yes"}, "choice: must be a list"),
        ({"stop": [""]}, "stop.0: must have at least 1 character"),
        ({"max_tokens": 0}, "max_tokens: must be greater than or equal to 1"),
        ({"max_tokens": "many"}, "max_tokens: must be a valid integer"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: min_tokens is greater than max_tokens"),
    ],
)
def test_what_is_wrong_with_a_sampling_field_stands_behind_its_name(fields, told):
    with pytest.raises(InvalidRequest) as caught:
        validated(SamplingParams, fields)
    assert str(caught.value) == told


def test_a_field_that_is_missing_is_told_as_missing():
    with pytest.raises(InvalidRequest, match=r"^kind: is missing$"):
        validated(GenerationRequest, {"body": {}})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"samplin": {}}, "samplin: unknown argument; did you mean sampling?"),
        ({"temperature": 0}, "temperature: unknown argument; it is a field of sampling"),
        ({"n": 4}, "n: unknown argument; submit_choices asks for several answers"),
        (
            {"sampling": {"n": 4}},
            "sampling.n: unknown field; submit_choices asks for",
        ),
        ({"request_id": "a b"}, "request_id: must match pattern"),
        ({"sampling": {"top_q": 1}}, "sampling.top_q: unknown field; did you mean top_p?"),
    ],
)
def test_an_argument_of_submit_is_told_by_the_name_its_caller_knows(arguments, told):
    with pytest.raises(InvalidRequest) as caught:
        build_request({"prompt": "x", **arguments}, tenant="t", now_ms=None)
    assert str(caught.value).startswith(told)


def test_a_misspelt_field_of_a_body_is_told_with_the_one_that_was_meant():
    body = {"prompt": "x", "max_tokenz": 3}
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(kind="completions", body=body).parse_body()
    assert str(caught.value) == "body.max_tokenz: unknown field; did you mean max_tokens?"


@pytest.mark.parametrize(
    ("kind", "field", "told"),
    [
        (
            "completions",
            {"echo": True},
            "echo: is of answers, not of requests: leave it out, or set it to false",
        ),
        ("completions", {"best_of": 4}, "best_of: is not supported: leave it out, or set it to 1"),
        ("completions", {"suffix": "x"}, "suffix: is not supported: leave it out"),
        ("completions", {"tools": []}, "tools: unknown field"),
        (
            "chat.completions",
            {"functions": [{}]},
            "functions: is not supported: use tools: leave it out, or set it to []",
        ),
        ("chat.completions", {"verbosity": "low"}, "verbosity: is not supported: leave it out"),
        ("chat.completions", {"suffix": "x"}, "suffix: unknown field"),
    ],
)
def test_a_field_that_openai_has_is_told_from_one_that_nobody_has(kind, field, told):
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, field)
    assert str(caught.value) == f"body.{told}"


def test_the_nearest_name_is_not_looked_for_where_that_takes_long(monkeypatch):
    names = [f"customer-{number:03d}" for number in range(500)]
    assert nearest("customer-4999", names) == "; did you mean customer-499?"
    long = ["-".join([name] * 5) for name in names]
    assert len(long[0]) <= 64
    assert len(long[0]) * sum(map(len, long)) > MAX_COMPARED_PAIRS
    monkeypatch.setattr("difflib.get_close_matches", None)
    assert nearest(long[0], long) == ""
    assert nearest("x" * 1_000_000, ["sql"]) == ""
