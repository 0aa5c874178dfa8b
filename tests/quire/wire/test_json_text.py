"""What Python's reader of JSON lets through and JSON does not allow is named by its path."""

import tracemalloc

import pytest

from quire.errors import InvalidRequest
from quire.wire.json_text import MAX_DIGITS, Fault, read_object

TWICE = "comes twice in its object"
NOT_FINITE = "must be a finite number: JSON has no NaN and no Infinity"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1, "b": 1.5e300, "c": [{}, {"d": null}]}', None),
        ('{"a": 1, "a": 1}', Fault("a", TWICE)),
        ('{"a": [0, {"b": {"c": 1, "d": 2, "c": 3}}]}', Fault("a.1.b.c", TWICE)),
        # Only one of two has a place in what was read.
        ('{"a": {"x": 1, "x": 2}, "a": 3}', Fault("a", TWICE)),
        ('{"a": NaN, "a": 1}', Fault("a", TWICE)),
        ('{"a": [1, {"b": NaN}, Infinity]}', Fault("a.1.b", NOT_FINITE)),
        ('{"a": -Infinity}', Fault("a", NOT_FINITE)),
        ('{"a": 1, "b": 1e999}', Fault("b", NOT_FINITE)),
    ],
)
def test_the_first_fault_is_named_by_its_path(text, fault):
    assert read_object(text)[1] == fault
    assert read_object(text.encode())[1] == fault


def test_an_integer_is_exact_or_refused_by_its_path():
    for number in ("9" * 30, "9" * MAX_DIGITS, "-" + "9" * MAX_DIGITS):
        assert read_object(f'{{"a": {number}}}') == ({"a": int(number)}, None)
    for number in ("9" * (MAX_DIGITS + 1), "-" + "1" * 100_000):
        _, fault = read_object(f'{{"b": {"1" * 40}, "a": [{number}, NaN]}}')
        assert fault == Fault("a.0", f"must have at most {MAX_DIGITS} digits")
        _, fault = read_object(f'{{"b": {number}, "a": 1, "a": 2}}')
        assert fault == Fault("a", TWICE)
        _, fault = read_object(f'{{"b": [Infinity, {number}]}}')
        assert fault == Fault("b.0", NOT_FINITE)


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", b"\xff", "[" * 100_000, "{'a': 1}"])
def test_what_is_no_object_is_refused_as_a_whole(text):
    with pytest.raises(InvalidRequest) as caught:
        read_object(text)
    assert caught.value.field == "body"


def test_a_long_name_above_many_values_is_held_once():
    text = f'{{"{"a" * 50_000}": [{"0," * 50_000}NaN]}}'
    tracemalloc.start()
    _, fault = read_object(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fault == Fault(f"{'a' * 50_000}.50000", NOT_FINITE)
    assert peak < 4 << 20, "a path for each value would take 2.5 GB"
