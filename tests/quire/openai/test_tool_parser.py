"""The parser of tool calls: what each format says, and that no way of cutting the text matters."""

import json
import random
from pathlib import Path
from time import process_time

import pytest

from quire.openai.tools.formats import FORMATS
from quire.openai.tools.parser import Piece, ReasoningMarks, ToolCallParser

NAMES = ("f", "g")
DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"


def deepseek(text: str) -> str:
    for short in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        text = text.replace(f"<{short}>", DEEPSEEK.format(short.replace("_", "\u2581")))
    return text


def content(text: str) -> Piece:
    return Piece("content", text)


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [Piece("call", name, index), Piece("arguments", arguments, index)]


TWO = [*call(0, "f", '{"q": 1}'), *call(1, "g", "{}")]

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
    (deepseek('<calls_begin><call_begin>function<sep>f\n```json\n{"q": 1}\n```'
     "<call_end>\n<call_begin>function<sep>g\n```json\n{}\n```<call_end><calls_end>"), TWO),
    (deepseek('<calls_begin><call_begin>f<sep>{"q": 1}<call_end>'
     "<call_begin>g<sep>{}<call_end><calls_end>"), TWO),
    ('<|tool_call|>[{"name": "f", "arguments": {"q": 1}}, {"name": "g"}]', TWO),
    ('[{"name": "f", "arguments": {"q": 1}}, {"name": "g"}]', TWO),
    ("3 is no call", [content("3 is no call")]),
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
    assert parsed(ToolCallParser(NAMES), text, []) == pieces


@pytest.mark.parametrize(("text", "pieces"), OUTPUTS)
def test_the_pieces_do_not_depend_on_the_chunks(text: str, pieces: list[Piece]) -> None:
    assert parsed(ToolCallParser(NAMES), text, list(range(1, len(text)))) == pieces
    for seed in range(20):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(len(text)), min(4, len(text))))
        assert parsed(ToolCallParser(NAMES), text, cuts) == pieces, cuts


@pytest.mark.parametrize(("text", "pieces"), OUTPUTS)
def test_what_is_known_after_a_text_is_a_function_of_it(text: str, pieces: list[Piece]) -> None:
    """So a stream that goes on elsewhere continues with the same pieces, wherever it was cut."""
    one_by_one, known = ToolCallParser(NAMES), list[Piece]()
    for index, char in enumerate(text):
        known += one_by_one.feed(char)
        assert joined(known) == joined(ToolCallParser(NAMES).feed(text[: index + 1]))


def test_reasoning_is_no_content_and_has_no_calls() -> None:
    text = '<think>\nMaybe <tool_call>\n</think>\n\n<tool_call>{"name": "f"}</tool_call>'
    parser = ToolCallParser(NAMES, reasoning=ReasoningMarks())
    assert parsed(parser, text, [9, 20]) == [
        Piece("reasoning", "Maybe <tool_call>"),
        *call(0, "f", "{}"),
    ]


def test_reasoning_that_the_prompt_opened_ends_at_its_mark() -> None:
    parser = ToolCallParser(reasoning=ReasoningMarks(is_open=True))
    assert parsed(parser, "so\n</think> Yes", [4]) == [Piece("reasoning", "so"), content("Yes")]


def test_an_output_without_reasoning_keeps_its_space() -> None:
    parser = ToolCallParser(reasoning=ReasoningMarks())
    assert parsed(parser, "  Yes", [1]) == [content("  Yes")]


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
    ],
    ids=lambda text: text[:40].strip() or "newlines",
)
def test_no_output_takes_long(text: str) -> None:
    """The clock is generous: 20 000 chunks of one character take a second."""
    parser, begin = ToolCallParser(NAMES), process_time()
    for char in text:
        parser.feed(char)
    parser.finish()
    assert process_time() - begin < 20


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "[TOOL_CALLS]", '<tool_call>{"name": "f"}', "\n", "<", '{"', "</tool_call>"],
)
def test_the_time_of_a_whole_text_grows_with_its_length(text: str) -> None:
    """Each mark must not be searched for in all of a long text, time and again."""

    def seconds(length: int) -> float:
        parser, begin = ToolCallParser(NAMES), process_time()
        parser.feed(text * (length // len(text)))
        parser.finish()
        return process_time() - begin

    assert seconds(300_000) < 3


def test_the_page_names_every_opening_mark() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "tools.md").read_text()
    for one in FORMATS:
        name = "DeepSeek" if "\uff5c" in one.begin else f"`{one.begin}`"
        assert name in page, one.family
