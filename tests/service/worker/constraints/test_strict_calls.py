"""Calls of strict functions under `auto`: text stays free, and every call validates."""

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from quire.errors import InvalidRequest
from quire.openai.tools.argument_types import argument_types
from quire.openai.tools.formats import FORMATS
from quire.openai.tools.parser import ToolCallParser
from quire.openai.tools.reasoning import DEFAULT_REASONING
from quire.wire.constraints import Constraint
from quire.wire.sampling import parse_body
from service.worker.constraints.grammars import CompiledGrammars, load_grammars
from service.worker.constraints.strict_calls import (
    CallMarks,
    answering_grammar,
    call_marks,
    mark_ids,
    strict_grammar,
)
from service.worker.constraints.terminals import json_rule
from tests.quire.wire.test_tools import CHAT, WEATHER, function
from tests.service.fake_model import EOS_ID, VOCAB_SIZE, byte_tokenizer
from tests.service.worker.constraints.called import FAMILIES

PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 99},
        "remark": {"type": "string"},
        "unit": {"type": ["string", "null"]},
        "at": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2},
    },
    "required": ["city", "remark"],
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
TYPES = argument_types(TOOLS)
NUM_SEEDS = 12
WITHOUT_HARMONY = [name for name in FAMILIES if name != "harmony"]
#: What most values end with.
ENDS = ('"', "}", "]", "\n</parameter>", "</arg_value>", "</function>", "</tool_call>")


def model(name: str) -> tuple[CallMarks, Tokenizer, CompiledGrammars]:
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in family.added])
    marks = call_marks(family.template, mark_ids(tokenizer))
    assert marks is not None
    size = VOCAB_SIZE + len(family.special) + len(family.added)
    grammars = load_grammars(tokenizer, vocab_size=size, eos_token_ids={EOS_ID})
    assert isinstance(grammars, CompiledGrammars)
    return marks, tokenizer, grammars


def parsed(text: str) -> list[tuple[str, Any]]:
    """The calls that the gateway finds, with their arguments."""
    parser = ToolCallParser(SCHEMAS, types=TYPES, reasoning=DEFAULT_REASONING.formats)
    pieces = [*parser.feed(text), *parser.finish()]
    calls = [one.text for one in pieces if one.kind == "call"]
    arguments = [json.loads(one.text) for one in pieces if one.kind == "arguments"]
    return list(zip(calls, arguments, strict=True))


def closing(text: str, ends: Sequence[str]) -> list[str]:
    """The characters that go on with an end of a value."""
    found = []
    for end in ends:
        known = next(k for k in range(len(end) - 1, -1, -1) if text.endswith(end[:k]))
        found.append(end[known])
        if known:
            return [end[known]]
    return found


def constraint_for(marks: CallMarks, **fields: Any) -> Constraint:
    use = parse_body("chat.completions", CHAT | {"tools": TOOLS} | fields).tools
    assert use is not None
    grammar = strict_grammar(marks, use, is_compact=False)
    return Constraint("grammar", grammar, use.strict_field)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def accepts(grammars: CompiledGrammars, wanted: Constraint, ids: list[int]) -> bool:
    return grammars.compile(wanted).deep_copy().validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_that_a_random_model_makes_validates(name: str) -> None:
    """The walk begins a call, as a random model hardly would, and then takes any token that may
    come. It ends as soon as the output may end."""
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    num_calls, names = 0, set()
    written = FAMILIES[name].write("weather", {"city": "", "at": []})
    own_ends = [end for end in ENDS if end in written]
    for seed in range(NUM_SEEDS):
        draw = random.Random(seed)
        called = draw.choice(["weather", "now", "note"])
        begin = FAMILIES[name].write(called, {})
        begin = begin[: begin.index(called) + len(called)]
        ids = ids_of(tokenizer, begin)
        follower = grammars.constraint(wanted, ids)
        while len(ids) < 300:
            bits = np.unpackbits(follower.allowed(ids), bitorder="little")
            allowed = [int(one) for one in np.flatnonzero(bits)]
            assert allowed and follower.failure is None
            if EOS_ID in allowed:
                break
            text = tokenizer.decode(ids[-20:], skip_special_tokens=False)
            next_chars = closing(text, own_ends)
            ends = [one for one in allowed if tokenizer.decode([one]) in next_chars]
            marked = [one for one in allowed if one >= VOCAB_SIZE]
            likely = (draw.random() < 0.6 and marked) or (draw.random() < 0.8 and ends)
            ids.append(draw.choice(likely or allowed))
        else:
            continue
        calls = parsed(tokenizer.decode(ids, skip_special_tokens=False))
        assert calls, tokenizer.decode(ids, skip_special_tokens=False)
        for each, own in calls:
            jsonschema.validate(own, SCHEMAS[each])
            names.add(each)
        num_calls += len(calls)
    assert num_calls > NUM_SEEDS // 2 and names == set(SCHEMAS)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_as_the_family_writes_them_may_come_and_mean_what_they_say(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    family = FAMILIES[name]
    values = {"city": "Oslo", "days": 7, "remark": "12 é\n<b>", "unit": None, "at": ["a", 1]}
    for given in (values, {"city": "Rome", "remark": "  x \\n "}):
        text = family.write("weather", given)
        if family.between is not None:
            text += family.between + family.write("now", {})
        ids = [*ids_of(tokenizer, text), EOS_ID]
        assert accepts(grammars, constraint_for(marks), ids), text
        assert parsed(text)[0] == ("weather", given)
        assert len(parsed(text)) == (2 if family.between is not None else 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_the_schema_refuses_cannot_come(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    for values in (
        {"city": "Paris", "remark": ""},
        {"city": "Rome", "days": 100, "remark": ""},
        {"city": "Rome"},
        {"city": "Rome", "remark": "", "at": [2]},
    ):
        text = FAMILIES[name].write("weather", values)
        assert not accepts(grammars, wanted, [*ids_of(tokenizer, text), EOS_ID]), text


@pytest.mark.parametrize("name", WITHOUT_HARMONY)
def test_text_is_free_where_the_parser_reads_no_call(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    for text in ("", "Hello {1}.", "<think>a</think>b", "a < b <tool", " \n It is [1]."):
        assert accepts(grammars, wanted, [*ids_of(tokenizer, text), EOS_ID]), text


@pytest.mark.parametrize("name", WITHOUT_HARMONY)
def test_whatever_the_parser_would_read_as_an_invalid_call_cannot_come(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    wanted = constraint_for(marks)
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    befores = ["", " ", "<think>a</think>\n", "<think>a</think><response>"]
    befores += [FAMILIES[name].write("now", {}) + (FAMILIES[name].between or "")]
    befores += [one.begin for one in FORMATS]
    for before in befores:
        for opened in ("", "["):
            text = before + opened + call
            parser = ToolCallParser(SCHEMAS, reasoning=DEFAULT_REASONING.formats)
            if any(one.text == "weather" for one in parser.feed(text)):
                assert not accepts(grammars, wanted, ids_of(tokenizer, text)), text
    parser = ToolCallParser(SCHEMAS)
    parser.feed(call)
    assert parser.num_calls, "the control: without the constraint it is a call"


def test_special_marks_of_reasoning_may_come() -> None:
    marks, tokenizer, grammars = model("mistral special")
    wanted = constraint_for(marks)
    call = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    assert accepts(grammars, wanted, ids_of(tokenizer, f"[THINK]a[/THINK]b{call}"))
    assert not accepts(grammars, wanted, ids_of(tokenizer, '[THINK]a[/THINK]{"'))


def test_a_call_of_mistral_may_have_an_id_where_its_template_writes_one() -> None:
    for name, with_id in (("mistral small", True), ("mistral 11", False)):
        marks, tokenizer, grammars = model(name)
        wanted = constraint_for(marks)
        for text, may_come in (
            ("[TOOL_CALLS]now[ARGS]{}", True),
            ("[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", with_id),
            ("[TOOL_CALLS]now[CALL_ID]a1B2c3D4[ARGS]{}", False),
        ):
            ids = [*ids_of(tokenizer, text), EOS_ID]
            assert accepts(grammars, wanted, ids) is may_come, (name, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_parallel_calls_there_is_one_at_most(name: str) -> None:
    marks, tokenizer, grammars = model(name)
    family = FAMILIES[name]
    one = family.write("now", {})
    two = one + (family.between or "") + one
    single, many = constraint_for(marks, parallel_tool_calls=False), constraint_for(marks)
    assert accepts(grammars, single, ids_of(tokenizer, one))
    assert not accepts(grammars, single, [*ids_of(tokenizer, two), EOS_ID])
    assert accepts(grammars, many, ids_of(tokenizer, two)) is (family.between is not None)


def test_a_message_of_gpt_oss_is_free_but_for_its_marks() -> None:
    marks, tokenizer, grammars = model("harmony")
    wanted = constraint_for(marks)
    thought = "<|channel|>analysis<|message|>{1}<|end|><|start|>assistant"
    said = "<|channel|>final<|message|>It is [1]."
    call = FAMILIES["harmony"].write("now", {})
    for text in (said, thought + said, thought + thought + call):
        assert accepts(grammars, wanted, [*ids_of(tokenizer, text), EOS_ID]), text
    plain = byte_tokenizer()
    assert not accepts(grammars, wanted, ids_of(tokenizer, said) + ids_of(plain, "<|end|>"))
    assert not accepts(grammars, wanted, ids_of(tokenizer, "Hello"))


def test_tokens_that_the_library_takes_for_special_ones_are_named_by_their_ids() -> None:
    import llguidance

    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    texts = ("<tool_call>", "<|a|>", "[ARGS]", "<function=", "\n</parameter>")
    tokenizer.add_tokens([AddedToken(text, special=False) for text in texts])
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    library = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=[EOS_ID])
    special = {
        one.content
        for id_, one in tokenizer.get_added_tokens_decoder().items()
        if library.is_special_token(id_)
    }
    assert set(mark_ids(tokenizer)) == special > {"<tool_call>"}


@pytest.mark.parametrize("template", ["", "<|channel|><|message|>"])
def test_a_format_whose_calls_cannot_be_told_from_text_has_no_marks(template: str) -> None:
    assert call_marks(template, {}) is None


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    bad = function("f", strict=True, parameters={"type": "object", "not": {"pattern": "a"}})
    use = parse_body("chat.completions", CHAT | {"tools": [bad]}).tools
    marks = call_marks("<tool_call>", {})
    assert use is not None and marks is not None
    with pytest.raises(ValueError, match="not"):
        strict_grammar(marks, use, is_compact=False)


def grammar_in_tags(**fields: Any) -> str:
    parameters = {"type": "object", "required": [], **fields}
    tools = [WEATHER, function("watch", strict=True, parameters=parameters)]
    use = parse_body("chat.completions", CHAT | {"tools": tools}).tools
    marks = call_marks("<tool_call><function=><parameter=>", {})
    assert use is not None and marks is not None
    return strict_grammar(marks, use, is_compact=False)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "b"}, "pattern"),
        ({"type": "string", "format": "date"}, "format"),
        ({"enum": ["a", "bb"], "maxLength": 1}, "maxLength"),
        ({"enum": ["a", "b"], "const": "a"}, "const"),
        ({"type": ["string", "null"], "anyOf": [{"type": "string"}], "maxLength": 1}, "schema"),
    ],
)
def test_what_tags_cannot_enforce_is_refused_with_the_name_of_the_function(
    schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(ValueError, match=rf"^in the function watch: .*{keyword}.*'a'"):
        grammar_in_tags(properties={"a": schema})


def test_annotations_of_a_text_do_not_matter_in_tags() -> None:
    plain = grammar_in_tags(properties={"a": {"type": "string"}})
    more = {"type": "string", "format": "ulid", "readOnly": True, "x-order": 1, "deprecated": True}
    assert grammar_in_tags(properties={"a": more}, markdownDescription="b") == plain


def test_an_argument_that_no_value_may_have_does_not_come_in_tags() -> None:
    assert "=b>" not in grammar_in_tags(properties={"a": {"type": "string"}, "b": False})
    with pytest.raises(ValueError, match="the required argument 'b' has no value"):
        grammar_in_tags(properties={"b": False}, required=["b"])


def test_strict_functions_end_where_the_grammar_does() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body("chat.completions", CHAT | {"tools": TOOLS, "ignore_eos": True})
    assert caught.value.field == "body.ignore_eos"


#: The form of content beside calls.
ANSWER = {
    "type": "object",
    "properties": {"degrees": {"type": "integer"}},
    "required": ["degrees"],
    "additionalProperties": False,
}
GOOD, CALLED = '{"degrees": 7}', {"city": "Rome", "remark": "x"}
#: A model without marks of calls, too.
ANY_MODEL = [*FAMILIES, None]


def answering(name: str | None, **fields: Any) -> tuple[Constraint, Tokenizer, CompiledGrammars]:
    """The constraint on content of the form ANSWER, or calls, for a family of models."""
    marks, tokenizer, grammars = model(name or "hermes")
    use = parse_body("chat.completions", CHAT | {"tools": TOOLS} | fields).tools
    assert use is not None
    grammar = answering_grammar(
        None if name is None else marks,
        use,
        json_rule("content", ANSWER, is_compact=False),
        is_compact=False,
    )
    return Constraint("grammar", grammar, "body.response_format"), tokenizer, grammars


def call_in(name: str | None, function_name: str, arguments: dict[str, Any]) -> str:
    if name is None:
        return json.dumps({"name": function_name, "arguments": arguments})
    return FAMILIES[name].write(function_name, arguments)


def content_in(name: str | None, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if name == "harmony" else text


@pytest.mark.parametrize("name", ANY_MODEL)
def test_content_of_a_form_or_calls_and_nothing_else(name: str | None) -> None:
    wanted, tokenizer, grammars = answering(name)

    def may_be(text: str) -> bool:
        matcher = grammars.compile(wanted).deep_copy()
        ids = ids_of(tokenizer, text)
        return matcher.validate_tokens([*ids, EOS_ID]) == len(ids) + 1

    assert may_be(content_in(name, GOOD))
    assert may_be(call_in(name, "weather", CALLED))
    assert may_be(call_in(name, "note", {"any": [1, "x"]}))
    for wrong in ("It is warm.", '{"degrees": "7"}', "{}", GOOD + GOOD, "[]"):
        assert not may_be(content_in(name, wrong)), wrong
    assert not may_be(call_in(name, "weather", {"city": "Bonn", "remark": "x"}))
    assert not may_be(call_in(name, "later", {}))
    assert not may_be(content_in(name, GOOD) + call_in(name, "now", {}))


@pytest.mark.parametrize("name", ANY_MODEL)
def test_what_may_come_beside_calls_is_read_as_content(name: str | None) -> None:
    parser = ToolCallParser(SCHEMAS, types=TYPES, reasoning=DEFAULT_REASONING.formats)
    pieces = [*parser.feed(content_in(name, GOOD)), *parser.finish()]
    assert "".join(one.text for one in pieces if one.kind == "content") == GOOD
    assert not any(one.kind == "call" for one in pieces)
