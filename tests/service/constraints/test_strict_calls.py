"""Calls of strict functions under `auto`: text stays free, and every call validates."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from quire.errors import InvalidRequest
from quire.openai.tools.formats import FORMATS
from quire.openai.tools.parser import ToolCallParser
from quire.openai.tools.reasoning import DEFAULT_REASONING
from quire.wire.constraints import Constraint
from quire.wire.sampling import parse_body
from service.constraints.grammars import CompiledGrammars, load_grammars
from service.constraints.strict_calls import CallMarks, call_marks, strict_grammar
from tests.quire.wire.test_tools import CHAT, function
from tests.service.fake_model import EOS_ID, VOCAB_SIZE, byte_tokenizer

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    function("weather", parameters=PLACE, strict=True),
    function("now", strict=True),
    function("note", parameters={"type": "object"}),
]
SCHEMAS: dict[str, Any] = {
    "weather": PLACE,
    "now": {"type": "object", "maxProperties": 0},
    "note": {"type": "object"},
}
SPECIAL = ("[TOOL_CALLS]", "[THINK]", "[/THINK]")
NUM_SEEDS = 50

#: Template texts and the special tokens of the model.
MODELS = {
    "hermes": ("<tool_call></tool_call>", ()),
    "mistral": ("[TOOL_CALLS]", ()),
    "special": ("[TOOL_CALLS]", SPECIAL),
    "granite": ("<|tool_call|>", ()),
}


def model(name: str) -> tuple[CallMarks, Tokenizer, CompiledGrammars]:
    template, special = MODELS[name]
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    ids = {text: tokenizer.token_to_id(text) for text in special}
    marks = call_marks(template, ids)
    assert marks is not None
    size = VOCAB_SIZE + len(special)
    grammars = load_grammars(tokenizer, vocab_size=size, eos_token_ids={EOS_ID})
    assert isinstance(grammars, CompiledGrammars)
    return marks, tokenizer, grammars


def constraint_for(marks: CallMarks, **fields: Any) -> Constraint:
    use = parse_body("chat.completions", CHAT | {"tools": TOOLS} | fields).tools
    assert use is not None
    grammar = strict_grammar(marks, use.schema_of_call(), is_parallel=use.is_parallel)
    return Constraint("grammar", grammar, use.strict_field)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def accepts(grammars: CompiledGrammars, wanted: Constraint, ids: list[int]) -> bool:
    return grammars.compile(wanted).deep_copy().validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("name", MODELS)
def test_every_call_that_a_random_model_makes_validates(name: str) -> None:
    """The walk begins a call, as a random model hardly would, and then takes any token that may
    come. It ends as soon as the output may end."""
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    num_calls, names = 0, set()
    for seed in range(NUM_SEEDS):
        draw = random.Random(seed)
        called = draw.choice(["weather", "now", "note"])
        begin = draw.choice(["", "So: "]) + marks.format.begin
        begin += "[" if marks.format.shape == "list" else ""
        ids = ids_of(tokenizer, begin + f'{{"name": "{called}", "arguments": ')
        follower = grammars.constraint(wanted, ids)
        while len(ids) < 400:
            bits = np.unpackbits(follower.allowed(ids), bitorder="little")
            allowed = [int(one) for one in np.flatnonzero(bits)]
            assert allowed and follower.failure is None
            if EOS_ID in allowed:
                break
            closing = [one for one in allowed if tokenizer.decode([one]) in ('"', "}", "]")]
            ids.append(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
        else:
            continue
        parser = ToolCallParser(SCHEMAS, reasoning=DEFAULT_REASONING.formats)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        pieces = [*parser.feed(text), *parser.finish()]
        calls = [one.text for one in pieces if one.kind == "call"]
        arguments = [json.loads(one.text) for one in pieces if one.kind == "arguments"]
        assert len(calls) == len(arguments) >= 1, text
        for each, own in zip(calls, arguments, strict=True):
            jsonschema.validate(own, SCHEMAS[each])
            names.add(each)
        num_calls += len(calls)
    assert num_calls > NUM_SEEDS // 2 and names == set(SCHEMAS)


@pytest.mark.parametrize("name", MODELS)
def test_text_is_free_where_the_parser_reads_no_call(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    for text in ("", "Hello {1}.", "<think>a</think>b", "a < b <tool", " \n It is [1]."):
        assert accepts(grammars, wanted, [*ids_of(tokenizer, text), EOS_ID]), text


@pytest.mark.parametrize("name", MODELS)
def test_whatever_the_parser_would_read_as_an_invalid_call_cannot_come(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    befores = ["", " ", "<think>a</think>\n", "<think>a</think><response>"]
    befores += [one.begin for one in FORMATS]
    for before in befores:
        for opened in ("", "["):
            text = before + opened + call
            parser = ToolCallParser(SCHEMAS, reasoning=DEFAULT_REASONING.formats)
            parser.feed(text)
            if parser.num_calls:
                assert not accepts(grammars, wanted, ids_of(tokenizer, text)), text
    parser = ToolCallParser(SCHEMAS)
    parser.feed(call)
    assert parser.num_calls, "the control: without the constraint it is a call"


def test_special_marks_of_reasoning_may_come() -> None:
    marks, tokenizer, grammars = model("special")
    wanted = constraint_for(marks)
    call = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    assert accepts(grammars, wanted, ids_of(tokenizer, f"[THINK]a[/THINK]b{call}"))
    assert not accepts(grammars, wanted, ids_of(tokenizer, '[THINK]a[/THINK]{"'))


@pytest.mark.parametrize("name", MODELS)
def test_without_parallel_calls_there_is_one_at_most(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    call = '{"name": "now", "arguments": {}}'
    end = marks.format.ends[0] if marks.format.shape == "object" else ""
    one = f"[{call}]" if marks.format.shape == "list" else call
    two = f"[{call}, {call}]" if marks.format.shape == "list" else None
    text = f"a{marks.format.begin}{one}{end}"
    single, many = constraint_for(marks, parallel_tool_calls=False), constraint_for(marks)
    again = f"a{marks.format.begin}{two}" if two else text + text
    assert accepts(grammars, single, ids_of(tokenizer, text))
    assert not accepts(grammars, single, ids_of(tokenizer, again))
    assert accepts(grammars, many, ids_of(tokenizer, again))


@pytest.mark.parametrize("template", ["", "<|python_tag|>", "[TOOL_CALLS]f[ARGS]"])
def test_a_format_whose_calls_cannot_be_told_from_text_has_no_marks(template: str) -> None:
    assert call_marks(template, {}) is None


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    bad = function("f", strict=True, parameters={"type": "object", "not": {}})
    use = parse_body("chat.completions", CHAT | {"tools": [bad]}).tools
    marks = call_marks("<tool_call>", {})
    assert use is not None and marks is not None
    with pytest.raises(ValueError, match="not"):
        strict_grammar(marks, use.schema_of_call(), is_parallel=True)


def test_strict_functions_end_where_the_grammar_does() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body("chat.completions", CHAT | {"tools": TOOLS, "ignore_eos": True})
    assert caught.value.field == "body.ignore_eos"
