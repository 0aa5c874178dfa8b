"""The grammars of outputs that may have calls: of strict functions, and beside content of a form.

Beside strict functions, the output is free text, and calls that are valid. Free text has no mark
that the parser of calls reads as one, and does not begin with JSON, which the parser reads as a
call, too. So whatever the parser finds has passed the schema. Knows no request.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from quire.openai.tools.formats import FORMATS, REASONING_FORMATS, ToolFormat
from quire.wire.tools import ToolUse
from service.worker.constraints.call_rules import call_rules, functions_of, written_arguments
from service.worker.constraints.terminals import any_of, json_rule, quoted, text_without, word

#: The begin of JSON that may be calls.
_JSON = r"[ \n\r\t]*[{\[]"
#: White space between a mark and JSON; the parser accepts more.
_SPACE = r"/[ \n\r\t]{1,8}/"

#: How gpt-oss writes calls: as messages to a function. The parser reads them as a part of its
#: format of reasoning, which has all marks.
_HARMONY = next(one for one in REASONING_FORMATS if one.name == "harmony")
HARMONY = ToolFormat("gpt-oss", _HARMONY.begin, "named")
_MESSAGE, _START, _CONSTRAIN, _CALL, _RETURN = _HARMONY.around


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How one model writes calls.

    `special` has the ids of marks, of calls and of reasoning, that are tokens of their own: see
    `mark_ids`.
    """

    format: ToolFormat
    special: Mapping[str, int]


def call_marks(template_text: str, special: Mapping[str, int]) -> CallMarks | None:
    """The marks of calls that a chat template writes; None if calls cannot be told from text.

    `special` has the ids of the tokens of the model that `mark_ids` names.
    """
    needed = (_HARMONY.begin, _HARMONY.end, _MESSAGE, _START)
    if HARMONY.begin in template_text and all(one in special for one in needed):
        return _marks_of(HARMONY, special)
    found = [one for one in FORMATS if one.begin in template_text]
    told = [one for one in found if one.told_by and one.told_by in template_text]
    for one in (*told, *(one for one in found if not one.told_by)):
        return _marks_of(one, special)
    return None


def mark_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The added tokens that a grammar must name by their ids, by their texts.

    For the library of grammars, special tokens are no text, and neither are other added tokens in
    angle brackets. So a grammar that has `<tool_call>` as a text only would let a model spell the
    mark, and never choose its token.
    """
    return {
        one.content: token_id
        for token_id, one in tokenizer.get_added_tokens_decoder().items()
        if one.special or (one.content.startswith("<") and one.content.endswith(">"))
    }


def answering_grammar(
    marks: CallMarks | None, use: ToolUse, content: str, *, is_compact: bool
) -> str:
    """The grammar of an output that is content of a given form, or calls and nothing else.

    `content` is the rule of that form, of this name. Without marks a call is JSON, as one that is
    required. SchemaRefused if a schema cannot be enforced.
    """
    if marks is None:
        call = use.schema_of_call()
        own = {"$defs": call.pop("$defs")}
        calls = {"type": "array", "items": call, "minItems": 1}
        lines = [
            json_rule("call", call | own, is_compact=is_compact),
            json_rule("calls", calls | own, is_compact=is_compact),
        ]
        return "\n".join([f"start: content | call{' | calls' * use.is_parallel}", content, *lines])
    if marks.format is HARMONY:
        return _grammar_of_messages(
            marks.special, use.schema_of_call(), content=content, is_compact=is_compact
        )
    one = marks.format
    first, last = (
        (f"({word(mark, marks.special)} SPACE?)? " for mark in one.around)
        if len(one.around) == 2
        else ("", "")
    )
    many = "+" if use.is_parallel else ""
    bare = " | call SPACE?" if one.shape == "objects" else ""
    called = f"{first}({word(one.begin, marks.special)} call SPACE?){many} {last}{bare}"
    rules = call_rules(one, marks.special, use, is_compact=is_compact)
    return "\n".join([f"start: content | {called}", content, *rules, f"SPACE: {_SPACE}"])


def strict_grammar(marks: CallMarks, use: ToolUse, *, is_compact: bool) -> str:
    """The grammar, in the syntax of Lark. SchemaRefused if a schema cannot be enforced."""
    if marks.format is HARMONY:
        return _grammar_of_messages(marks.special, use.schema_of_call(), is_compact=is_compact)
    rules = call_rules(marks.format, marks.special, use, is_compact=is_compact)
    begin, ends = marks.format.begin, marks.format.ends
    # One complement each: with two, the library takes a text for possible that it cannot be.
    wrong = f"(?s:.*)(({any_of(_marks_of_calls())})|({any_of(_before_content())}){_JSON})(?s:.*)"
    lines = [
        *rules,
        f"SPACE: {_SPACE}",
        f"FREE: /(?s:.*)/ & ~/{wrong}/",
        f"FIRST: /(?s:.*)/ & ~/({wrong})|({_JSON}(?s:.*))/",
    ]
    bare, follows = "", "FREE"
    if marks.format.shape == "objects":
        # Such a call may stand at the start, without a mark. A semicolon after it begins another.
        bare, follows = " | call AFTER?", "AFTER"
        lines.append(f"AFTER: /(?s:.*)/ & ~/({wrong})|([ \\n\\r\\t]*;(?s:.*))/")
    many = "*" if use.is_parallel else "?"
    if begin in marks.special:
        inside = {begin, *ends, *(marks.format.tags.all if marks.format.tags else ())}
        others = [id_ for text, id_ in marks.special.items() if text not in inside]
        between = " (mark FIRST?)*" if others else ""
        after = " (mark FREE?)*" if others else ""
        lines += [f"mark: {' | '.join(f'<[{id_}]>' for id_ in others)}"] if others else []
        calls = f"({word(begin, marks.special)} call {follows}?{after}){many}"
        start = f"start: FIRST?{between} {calls}{bare}"
    else:
        lines += [
            "first_call[lazy]: FIRST_CALL",
            f"FIRST_CALL: FIRST {quoted(begin)}",
            "next_call[lazy]: NEXT_CALL",
            f"NEXT_CALL: FREE {quoted(begin)}",
        ]
        more = "(next_call call)* " if use.is_parallel else ""
        start = f"start: first_call call {more}{follows}? | FIRST?{bare}"
    return "\n".join([start, *lines])


def _grammar_of_messages(
    special: Mapping[str, int],
    schema_of_call: Mapping[str, Any],
    *,
    is_compact: bool,
    content: str = "",
) -> str:
    """The grammar of gpt-oss: reasoning and comments, and then an answer or one call.

    With a rule `content`, the answer has this form.
    """

    def mark(text: str) -> str:
        return word(text, special)

    calls, rules = [], []
    for index, (name, home) in enumerate(functions_of(schema_of_call)):
        rules.append(
            f"call{index}: {mark(_HARMONY.begin)} {quoted(f'commentary to=functions.{name} ')}"
            f' ({mark(_CONSTRAIN)})? "json" {mark(_MESSAGE)} json{index}'
        )
        written = written_arguments(schema_of_call, home)
        rules.append(json_rule(f"json{index}", written, is_compact=is_compact))
        calls.append(f"call{index}")
    begin = f"{mark(_HARMONY.begin)} "
    end = f'{mark(_HARMONY.end)} {mark(_START)} "assistant"'
    # Many models end the output with one of these marks; for others it is a part of the text.
    last = f"({mark(_CALL)})?" if _CALL in special else ""
    return "\n".join(
        [
            f"start: before* (({' | '.join(calls)}) {last} | answer)",
            f'before: {begin}("analysis" | "commentary") {mark(_MESSAGE)} TEXT? {end}',
            f'answer: {begin}"final" {mark(_MESSAGE)} {"content" if content else "TEXT?"}',
            content,
            f"TEXT: {text_without(_HARMONY.marks)}",
            *rules,
        ]
    )


def _marks_of(one: ToolFormat, special: Mapping[str, int]) -> CallMarks:
    marks = {mark for each in REASONING_FORMATS for mark in each.marks}
    known = marks | one.marks_in(special)
    return CallMarks(one, {text: id_ for text, id_ in special.items() if text in known})


def _marks_of_calls() -> Iterable[str]:
    return dict.fromkeys(one.begin for one in FORMATS)


def _before_content() -> Iterable[str]:
    """The marks after which an output may begin with JSON, as it may at its start."""
    return [mark for one in REASONING_FORMATS for mark in (one.end, *one.around[:1])]
