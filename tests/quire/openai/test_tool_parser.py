"""The parser of tool calls: what each format says, and that no way of cutting the text matters."""

import json
import random
from itertools import accumulate
from pathlib import Path
from time import process_time
from typing import get_args

import pytest

from quire.openai.tools.answers import MessageStream
from quire.openai.tools.formats import FORMATS, REASONING_FORMATS
from quire.openai.tools.parser import Piece, ToolCallParser
from quire.openai.tools.reasoning import (
    DEFAULT_REASONING,
    ReasoningSetting,
    ReasoningUse,
    reasoning_use_of,
)

NAMES = ("f", "g")
#: `t` is a text, `u` a text or nothing, `m` a map; of all others the type is not known.
TYPES = {"f": {"t": "s", "u": "sz", "m": "o", "n": "i"}}
DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"


def deepseek(text: str) -> str:
    for short in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        text = text.replace(f"<{short}>", DEEPSEEK.format(short.replace("_", "\u2581")))
    return text


def content(text: str) -> Piece:
    return Piece("content", text)


def thought(text: str) -> Piece:
    return Piece("reasoning", text)


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [Piece("call", name, index), Piece("arguments", arguments, index)]


TWO = [*call(0, "f", '{"q": 1}'), *call(1, "g", "{}")]

#: A map as Python writes it, in which the end tag is a text.
PYTHON_TAG = (
    "<tool_call><function=f><parameter=m>\n"
    """{'a': 'it\\'s "1"', "b": [True, None, '}']}"""
    "\n</parameter></function></tool_call>"
)

# Output, pieces.
OUTPUTS = [
    ("Wait.\n<tool_call>\n" + '{"name": "f", "arguments": {"q": 1}}' + "\n</tool_call>"
     + '\n<tool_call>{"name": "g"}</tool_call>\n', [content("Wait."), *TWO]),
    ('<tool_call>{"arguments": {"q": 1}, "name": "f"}</tool_call> and then',
     [*call(0, "f", '{"q": 1}'), content("and then")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "}]\\"", "b": [{}]}}</tool_call>',
     call(0, "f", '{"a": "}]\\"", "b": [{}]}')),
    ('<tool_call>{"name": "f", "arguments": "{\\"q\\": 1}"}</tool_call>',
     call(0, "f", '{"q": 1}')),
    ('<tool_call>{"name": "f", "arguments": {"q": "cut of',
     call(0, "f", '{"q": "cut of')),
    ('<tool_call>{"name": "f"', [Piece("call", "f", 0)]),
    (" 1 <tool_ 2 </tool_call> \n", [content(" 1 <tool_ 2 </tool_call> \n")]),
    ("So\n\n<tool_call> no", [content("So\n\n<tool_call> no")]),
    ('<tool_call>{"name": "h", "arguments": {}}</tool_call>',
     [content('<tool_call>{"name": "h", "arguments": {}}</tool_call>')]),
    ('{"name": "f", "parameters": {"q": 1}}; {"name": "g", "parameters": {}}', TWO),
    ('<|python_tag|>{"type": "function", "name": "f", "parameters": {"q": 1}}',
     call(0, "f", '{"q": 1}')),
    ('{"answer": [1, 2]} is JSON', [content('{"answer": [1, 2]} is JSON')]),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"q": 1}, "id": "a1"}, {"name": "g"}]',
     TWO),
    ('So:[TOOL_CALLS]f[ARGS]{"q": 1}[TOOL_CALLS]g[ARGS]{}',
     [content("So:"), *TWO]),
    ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"q": 1}[TOOL_CALLS]g[CALL_ID]f5G6h7I8j[ARGS]{}', TWO),
    ('[TOOL_CALLS] f[CALL_ID]a1B2c3D4e[ARGS] {"q": 1} [TOOL_CALLS]g[CALL_ID][ARGS]{}', TWO),
    ('So:[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"q', [content("So:"), *call(0, "f", '{"q')]),
    ("[TOOL_CALLS]h[CALL_ID]a1B2c3D4e[ARGS]{}",
     [content("[TOOL_CALLS]h[CALL_ID]a1B2c3D4e[ARGS]{}")]),
    ("[TOOL_CALLS]f[CALL_ID]" + "a" * 200 + "[ARGS]{}",
     [content("[TOOL_CALLS]f[CALL_ID]" + "a" * 200 + "[ARGS]{}")]),
    (deepseek('<calls_begin><call_begin>function<sep>f\n```json\n{"q": 1}\n```'
     "<call_end>\n<call_begin>function<sep>g\n```json\n{}\n```<call_end><calls_end>"), TWO),
    (deepseek('<calls_begin><call_begin>f<sep>{"q": 1}<call_end>'
     "<call_begin>g<sep>{}<call_end><calls_end>"), TWO),
    ('<|tool_call|>[{"name": "f", "arguments": {"q": 1}}, {"name": "g"}]', TWO),
    ('[{"name": "f", "arguments": {"q": 1}}, {"name": "g"}]', TWO),
    (("Wait.\n<tool_call>\n<function=f>\n<parameter=q>\n1\n</parameter>\n</function>\n</tool_call>"
     "\n<tool_call>\n<function=g>\n</function>\n</tool_call>"), [content("Wait."), *TWO]),
    (('<tool_call><function=f><parameter=t>\n1 "\n\n<b>\\\n</parameter><parameter=u>null'
     "</parameter><parameter=v>so</parameter></function></tool_call>"),
     call(0, "f", '{"t": "1 \\"\\n\\n<b>\\\\", "u": null, "v": "so"}')),
    (('<tool_call><function=f><parameter=u>12</parameter><parameter=m>\n{"a": "</parameter>"}\n'
     "</parameter><parameter=n>True</parameter></function></tool_call> x"),
     [*call(0, "f", '{"u": "12", "m": {"a": "</parameter>"}, "n": "True"}'), content("x")]),
    (("<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
     "<tool_call>g</tool_call>"), TWO),
    (("<tool_call>f<arg_key>t</arg_key><arg_value> a\n</arg_value><arg_key>m</arg_key>"
     "<arg_value>[]</arg_value></tool_call>"), call(0, "f", '{"t": " a\\n", "m": []}')),
    ("<seed:tool_call>\n<function=f>\n<parameter=q>1</parameter>\n</function>\n</seed:tool_call>",
     call(0, "f", '{"q": 1}')),
    ("<tool_call><function=h></function></tool_call>",
     [content("<tool_call><function=h></function></tool_call>")]),
    ("<tool_call>f<arg_key>t</arg_key><arg_value>cut",
     call(0, "f", '{"t": "cut')),
    ("3 is no call", [content("3 is no call")]),
    (PYTHON_TAG, call(0, "f", '{"m": {"a": "it\'s \\"1\\"", "b": [true, null, "}"]}}')),
    ("<tool_call><function=f><parameter=m>{foo}</parameter><parameter=n>1</parameter></function>",
     call(0, "f", '{"m": "{foo}", "n": 1}')),
    ("<tool_call><function=f><parameter=m>{} and more</parameter></function></tool_call>",
     call(0, "f", '{"m": "{} and more"}')),
    ("<tool_call>f<arg_key>n</arg_key><arg_value>" + "9" * 5000 + "</arg_value></tool_call>",
     call(0, "f", '{"n": ' + "9" * 5000 + "}")),
    ("""<tool_call>{"name": "f", "arguments": {'a': 'it\\'s }', "b": True}}</tool_call>""",
     call(0, "f", '{"a": "it\'s }", "b": true}')),
    ("""<tool_call>{"arguments": {'a': None}, "name": "f"}</tool_call>""",
     call(0, "f", '{"a": null}')),
    ("""[TOOL_CALLS]f[ARGS]{'a': ["]", False]}[TOOL_CALLS]g[ARGS]{}""",
     [*call(0, "f", '{"a": ["]", false]}'), *call(1, "g", "{}")]),
    ("""<tool_call>{"name": "f", "arguments": '{"q": 1}'}</tool_call>""", call(0, "f", '{"q": 1}')),
    ("""<tool_call>{'name': 'f'}</tool_call>""",
     [content("""<tool_call>{'name': 'f'}</tool_call>""")]),
    ("[TOOL_CALLS]h[ARGS]{}", [content("[TOOL_CALLS]h[ARGS]{}")]),
    (' {"name": "h", "arguments": {}}', [content(' {"name": "h", "arguments": {}}')]),
]  # fmt: skip


def joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces, adjacent ones of one kind and call joined."""
    all_pieces: list[Piece] = []
    for one in pieces:
        last = all_pieces[-1] if all_pieces else None
        if last and (last.kind, last.index) == (one.kind, one.index):
            all_pieces[-1] = Piece(one.kind, last.text + one.text, one.index)
        else:
            all_pieces.append(one)
    return all_pieces


def parsed(parser: ToolCallParser, text: str, cuts: list[int]) -> list[Piece]:
    pieces = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.feed(text[begin:end])
    return joined(pieces + parser.finish())


@pytest.mark.parametrize(("text", "pieces"), OUTPUTS)
def test_an_output_is_split_into_its_pieces(text: str, pieces: list[Piece]) -> None:
    assert parsed(ToolCallParser(NAMES, types=TYPES), text, []) == pieces


@pytest.mark.parametrize(("text", "pieces"), OUTPUTS)
def test_the_pieces_do_not_depend_on_the_chunks(text: str, pieces: list[Piece]) -> None:
    assert parsed(ToolCallParser(NAMES, types=TYPES), text, list(range(1, len(text)))) == pieces
    for seed in range(20):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(len(text)), min(4, len(text))))
        assert parsed(ToolCallParser(NAMES, types=TYPES), text, cuts) == pieces, cuts


@pytest.mark.parametrize(("text", "pieces"), OUTPUTS)
def test_what_is_known_after_a_text_is_a_function_of_it(text: str, pieces: list[Piece]) -> None:
    """So a stream that goes on elsewhere continues with the same pieces, wherever it was cut."""
    one_by_one, known = ToolCallParser(NAMES, types=TYPES), list[Piece]()
    for index, char in enumerate(text):
        known += one_by_one.feed(char)
        assert joined(known) == joined(ToolCallParser(NAMES, types=TYPES).feed(text[: index + 1]))


# Format, output, pieces.
REASONING = [
    ("think", '<think>\nMaybe <tool_call>\n</think>\n\n<tool_call>{"name": "f"}</tool_call>',
     [thought("Maybe <tool_call>"), *call(0, "f", "{}")]),
    ("think", " <think>a</think> b <think>c</think>",
     [thought("a"), content("b <think>c</think>")]),
    ("think", "<think>\n\n</think>\n\nYes.", [content("Yes.")]),
    ("think", "<think>a </thin", [thought("a </thin")]),
    ("think", "<think>a</think><respon", [thought("a"), content("<respon")]),
    ("think", "<think>a</think>\n<response> b </response>", [thought("a"), content("b")]),
    ("think", "<think>a</think>\nb </response>", [thought("a"), content("b </response>")]),
    ("think", "  Yes <think>", [content("  Yes <think>")]),
    ("think", "<thin", [content("<thin")]),
    ("think", "[THINK]a[/THINK]b", [content("[THINK]a[/THINK]b")]),
    ("mistral", "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}",
     [thought("a"), content("b"), *call(0, "f", "{}")]),
    ("seed", "<seed:think>a</seed:think>b", [thought("a"), content("b")]),
    ("command", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
     [thought("a"), content("b")]),
    ("granite", "Here is my thought process: a\n\nHere is my response: b",
     [thought("a"), content("b")]),
    ("harmony", ("<|channel|>analysis<|message|>a b<|end|><|start|>assistant"
     "<|channel|>final<|message|>It is."), [thought("a b"), content("It is.")]),
    ("harmony", ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
     ' to=functions.f <|constrain|>json<|message|>{"q": 1}<|call|>'),
     [thought("a"), *call(0, "f", '{"q": 1}')]),
    ("harmony", ("<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant to=functions.g"
     "<|channel|>commentary json<|message|>{}"), [content("I ask."), *call(0, "g", "{}")]),
    ("harmony", "<|channel|>commentary to=functions.h<|message|>{}",
     [content("<|channel|>commentary to=functions.h<|message|>{}")]),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assi", [thought("a")]),
    ("harmony", "<|channel|>" + "x" * 300, [content("<|channel|>" + "x" * 300)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "pieces"), REASONING)
def test_reasoning_is_no_content_and_has_no_calls(
    name: str, text: str, pieces: list[Piece]
) -> None:
    def parser() -> ToolCallParser:
        return ToolCallParser(NAMES, reasoning=ReasoningUse((name,)).formats)

    assert parsed(parser(), text, []) == pieces
    assert parsed(parser(), text, list(range(1, len(text)))) == pieces
    one_by_one, known = parser(), list[Piece]()
    for index, char in enumerate(text):
        known += one_by_one.feed(char)
        assert joined(known) == joined(parser().feed(text[: index + 1]))


def test_the_marks_of_every_format_tell_it_apart() -> None:
    """Formats with marks of ordinary words count only if they are asked for."""
    for name, text, pieces in REASONING:
        is_known = name != "granite"
        parser = ToolCallParser(NAMES, reasoning=DEFAULT_REASONING.formats)
        if pieces[0].kind == "reasoning":
            found = parsed(parser, text, [])
            assert (found == pieces) is is_known, text
    assert {name for name, *_ in REASONING} == {one.name for one in REASONING_FORMATS}
    assert set(get_args(ReasoningSetting)) == {"auto", "none"} | {
        one.name for one in REASONING_FORMATS
    }


def test_words_count_as_marks_only_if_the_caller_asks_the_template_for_them() -> None:
    assert "granite" not in reasoning_use_of({}).names
    assert "granite" in reasoning_use_of({"chat_template_kwargs": {"thinking": True}}).names
    assert reasoning_use_of({}, setting="granite").names == ("granite",)
    assert reasoning_use_of({}, setting="none").names == ()


def test_no_opening_mark_is_the_beginning_of_another_one() -> None:
    begins = [one.begin for one in REASONING_FORMATS]
    assert not [(a, b) for a in begins for b in begins if a != b and b.startswith(a)]


def test_without_marks_the_text_passes_as_it_comes() -> None:
    parser = ToolCallParser(reasoning=DEFAULT_REASONING.formats)
    assert parser.feed("one ") == [content("one ")]
    assert parser.is_plain
    assert parser.feed(" <think>") == [content(" <think>")]


def test_the_tokens_of_reasoning_are_counted_however_the_text_comes() -> None:
    tokens = ["<think>", "\n", "ab", "c</", "think>\n", "", "d", "e"]
    text, ends = "".join(tokens), list(accumulate(map(len, tokens)))
    for size in range(1, len(tokens) + 1):
        stream = MessageStream("a", 0)
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            stream.delta("".join(part), list(accumulate(map(len, part))))
        stream.last_delta("")
        assert stream.num_reasoning_tokens == 5, size
    whole = MessageStream("a", 0)
    assert whole.whole(text, ends)["reasoning_content"] == "abc"
    assert whole.num_reasoning_tokens == 5
    cut = MessageStream("a", 0)
    cut.whole("".join(tokens[:3]), ends[:3])
    assert cut.num_reasoning_tokens == 3


def test_the_tokens_of_each_message_of_reasoning_are_counted() -> None:
    head, end = ["<|channel|>", "analysis", "<|message|>"], ["<|end|>", "<|start|>", "assistant"]
    tokens = [*head, "a", "b", *end, *head, "c", *end, "<|channel|>", "final", "<|message|>", "d"]
    for size in (1, 3, len(tokens)):
        stream = MessageStream("a", 0)
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            stream.delta("".join(part), list(accumulate(map(len, part))))
        assert stream.num_reasoning_tokens == len(["a", "b", "<|end|>", "c", "<|end|>"]), size


def test_without_the_ends_of_the_texts_nothing_is_counted() -> None:
    stream = MessageStream("a", 0)
    stream.delta("<think>a</think>b")
    stream.last_delta("")
    assert stream.num_reasoning_tokens is None


def test_random_calls_come_back_whatever_their_arguments_are() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        arguments = json.dumps(_object(draw, depth=3), ensure_ascii=draw.random() < 0.5)
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        cuts = sorted(draw.sample(range(len(text)), min(9, len(text))))
        assert parsed(ToolCallParser(NAMES), text, cuts) == call(0, "f", arguments)


def _object(draw: random.Random, *, depth: int) -> dict[str, object]:
    return {_string(draw): _value(draw, depth=depth) for _ in range(draw.randrange(4))}


def _value(draw: random.Random, *, depth: int) -> object:
    kind = draw.randrange(6 if depth else 4)
    if kind == 4:
        return _object(draw, depth=depth - 1)
    if kind == 5:
        return [_value(draw, depth=depth - 1) for _ in range(draw.randrange(4))]
    return [_string(draw), draw.random(), None, draw.random() < 0.5][kind]


def _string(draw: random.Random) -> str:
    return "".join(draw.choice('ab"\\{}[]<>/\n\u00e9\u4e2d') for _ in range(draw.randrange(8)))


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 20_000,
        "<" * 20_000,
        "<tool_call>" * 2_000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 20_000,
        '<tool_call>{"name": "f", "arguments": ' + "[" * 20_000,
        '<tool_call>{"arguments": {"a": "' + "x" * 20_000,
        '<tool_call>{"name": "f", "arguments": "' + "x" * 20_000,
        '<tool_call>{"name": "f", "arguments": 1' + " " * 20_000,
        '<tool_call>{"' + "a" * 20_000,
        "<tool_call><function=f><parameter=t>" + "\n</parameter" * 2_000,
        "<tool_call><function=f><parameter=u>" + "x" * 20_000,
        "<tool_call><function=f><parameter=m>" + "[" * 20_000,
        "<tool_call><function=f><parameter=m>{" + "'\\x4" * 5_000,
        '<tool_call>{"name": "f", "arguments": {' + "'\\" * 10_000,
        '<tool_call>{"name": "f", "arguments": [' + "NoTrueFals" * 2_000,
        "<tool_call>f<arg_key>" * 1_000,
        "<think>" + "</think" * 3_000,
        "<think>" * 3_000,
        "<think>" + " " * 20_000,
        "<|channel|>analysis<|message|>" + "<|end|" * 3_000,
        "<|channel|>a<|message|><|end|>" * 600,
    ],
    ids=lambda text: text[:40].strip() or "newlines",
)
def test_no_output_takes_long(text: str) -> None:
    """The clock is generous: 20 000 chunks of one character take a second."""
    formats = DEFAULT_REASONING.formats
    parser = ToolCallParser(NAMES, types=TYPES, reasoning=formats)
    begin = process_time()
    for char in text:
        parser.feed(char)
    parser.finish()
    assert process_time() - begin < 20


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "[TOOL_CALLS]",
        '<tool_call>{"name": "f"}',
        "\n",
        "<",
        '{"',
        "</tool_call>",
        "<think>",
        "</think>",
    ],
)
def test_the_time_of_a_whole_text_grows_with_its_length(text: str) -> None:
    """Each mark must not be searched for in all of a long text, time and again."""

    def seconds(length: int) -> float:
        parser = ToolCallParser(NAMES, reasoning=DEFAULT_REASONING.formats)
        begin = process_time()
        parser.feed(text * (length // len(text)))
        parser.finish()
        return process_time() - begin

    assert seconds(300_000) < 3


def test_the_page_names_every_opening_mark() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "tools.md").read_text()
    for one in FORMATS:
        name = "DeepSeek" if "\uff5c" in one.begin else f"`{one.begin}`"
        assert name in page, one.family


def test_the_page_about_reasoning_names_the_marks_of_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "reasoning.md").read_text()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert list(rows) == [one.name for one in REASONING_FORMATS]
    for one in REASONING_FORMATS:
        for mark in one.marks:
            # A bar would end the cell of a table.
            assert f"`{mark.replace('|', chr(92) + '|')}`" in page, mark
