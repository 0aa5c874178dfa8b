"""What is asked for by callers who mean harm: refused, or served, and nobody is held up by it."""

import random
import time
from collections.abc import Callable
from itertools import pairwise, product
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraint import Constraint as EngineConstraint
from quire.errors import InvalidRequest
from quire.wire.constraints import MAX_CONSTRAINT_BYTES
from service.worker.constraints.matching import MAX_REASON_LENGTH
from tests.service.walks import EOS_ID, OTHER_EOS_ID, constraint, may_come, vocab_size

#: What any one call may take, on whatever threads, in seconds of a core: some tenths are usual.
BOUND_SECONDS = 5.0


def nested(levels: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    return wrap(nested(levels - 1, wrap, inner)) if levels else inner


def references(count: int) -> dict[str, Any]:
    """Each object refers twice to the next."""
    return {
        "$defs": {
            f"d{n}": {
                "type": "object",
                "properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"},
            }
            for n in range(count)
        }
        | {f"d{count}": {"type": "string"}},
        "$ref": "#/$defs/d0",
    }


def rules(count: int) -> str:
    """Each is twice the next, or a letter."""
    lines = [f'r{n}: r{n + 1} r{n + 1} | "x"' for n in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "y"'])


def chain_of_references(length: int) -> dict[str, Any]:
    """Each is an array of the next."""
    chain = {f"{n}": {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(length)}
    return {"$defs": chain | {f"{length}": {"type": "null"}}, "$ref": "#/$defs/0"}


def chain_of_rules(letters: str, length: int, *, parentheses: int = 0) -> str:
    """Each is the next, in parentheses; of capital letters they are terminals."""
    names = ["".join(name) for name in product(letters, repeat=3)][:length]
    opened, closed = "(" * parentheses, ")" * parentheses
    lines = [f"{one}:{opened}{after}{closed}" for one, after in pairwise(names)]
    return "\n".join([f"start:{names[0]}", *lines, f'{names[-1]}:"a"'])


NASTY: dict[str, tuple[str, Any]] = {
    "a deep schema": ("json_schema", nested(49, lambda s: {"properties": {"a": s}}, {})),
    "branches in branches": (
        "json_schema",
        nested(9, lambda s: {"anyOf": [s, {"type": "array", "items": s}]}, {"type": "integer"}),
    ),
    "all of many": (
        "json_schema",
        {
            "allOf": [
                {"anyOf": [{"required": [f"p{n}"]}, {"required": [f"q{n}"]}]} for n in range(20)
            ]
        },
    ),
    "references that double": ("json_schema", references(200)),
    "a long chain of references": ("json_schema", chain_of_references(1400)),
    "a reference to itself": ("json_schema", {"$ref": "#"}),
    "a reference to elsewhere": ("json_schema", {"$ref": "http://127.0.0.1:1/schema.json"}),
    "a thousand optional properties": (
        "json_schema",
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}},
    ),
    "five thousand values": ("json_schema", {"enum": [f"v{n}" for n in range(5000)]}),
    "a long string": ("json_schema", {"type": "string", "minLength": 10**6, "maxLength": 10**7}),
    "a long array": (
        "json_schema",
        {"items": {"type": "null"}, "type": "array", "minItems": 10**6},
    ),
    "multiples of a large prime": ("json_schema", {"type": "integer", "multipleOf": 999999937}),
    "a schema that tells the library what to do": (
        "json_schema",
        {"type": "object", "x-guidance": {"whitespace_pattern": ".*", "lenient": True}},
    ),
    "repetitions of repetitions": ("regex", nested(8, lambda s: f"({s}){{1,100}}", "a")),
    "a repetition without end": ("regex", "a{1,1000000000}"),
    "a pattern that others backtrack on": ("regex", "(a|aa)+(a|aa)+(a|aa)+(a|aa)+b"),
    "a pattern of many states": ("regex", "(.*a.{50}b)+"),
    "many patterns": ("regex", "|".join(f"x{n}.*y{n}" for n in range(3000))),
    "classes of all characters": ("regex", r"(\p{L}|\p{N}){1,300}[^\p{L}]{1,300}"),
    "parentheses": ("regex", "(" * 20000 + "a" + ")" * 20000),
    "as long as may be": ("regex", "ab?" * (MAX_CONSTRAINT_BYTES // 3 - 3)),
    "a grammar of parentheses": ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "an ambiguous grammar": (
        "grammar",
        'start: a a a a a a a a\na: /[a-z]*/ | a " " | b a |\nb: "b"',
    ),
    "rules that double": ("grammar", rules(2000)),
    "a long chain of rules": ("grammar", chain_of_rules(ascii_lowercase, 8000)),
    "a long chain of terminals": ("grammar", chain_of_rules(ascii_uppercase, 8000)),
    "a chain of terminals in parentheses": (
        "grammar",
        chain_of_rules(ascii_uppercase, 1400, parentheses=19),
    ),
    "fewer of them, that begin well": ("grammar", rules(100)),
    "patterns that cross": ("grammar", "start: /(.*a.{9}b.*)&(.*c.{9}d.*)&(~(.*g.*))/"),
    "a rule of itself": ("grammar", "start: start"),
    "tokens by number": ("grammar", "start: <[5-900000000]>"),
    "a file": ("grammar", "%import .etc.passwd\nstart: passwd"),
    "no grammar": ("grammar", "\x00start: ((((("),
}


def made_of(kind: str, value: Any) -> EngineConstraint | InvalidRequest:
    try:
        return constraint(kind, value)
    except InvalidRequest as refused:
        return refused


@pytest.mark.parametrize(("kind", "value"), NASTY.values(), ids=NASTY)
def test_what_is_meant_to_hold_a_worker_up_is_refused_fails_or_works_and_soon(
    kind: str, value: Any
):
    def timed(call: Callable[..., Any], *arguments: Any, **others: Any) -> Any:
        began = time.process_time()
        try:
            return call(*arguments, **others)
        finally:
            assert time.process_time() - began < BOUND_SECONDS

    rule = timed(made_of, kind, value)
    if isinstance(rule, InvalidRequest):
        assert rule.field == f"body.{kind}"
        assert 0 < len(rule.message) <= MAX_REASON_LENGTH
        assert "\n" not in rule.message
        return
    chance, output = random.Random(1), []
    while len(output) < 100 and not timed(rule.is_complete, output):
        found = timed(may_come, rule, output)
        if not found:
            assert rule.failure
            return
        output.append(chance.choice(found))
        if output[-1] in (EOS_ID, OTHER_EOS_ID):
            return


@given(
    st.sampled_from(["regex", "grammar"]),
    st.text(alphabet='ab(|)*+?[]{}1,&~\\"/:<>%$ \nstart', min_size=1, max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_rule_or_is_refused(kind: str, text: str):
    value = f"start: {text}" if kind == "grammar" else text
    rule = made_of(kind, value)
    if isinstance(rule, InvalidRequest):
        assert rule.message
    else:
        assert len(rule.allowed([])) * 8 >= vocab_size()
