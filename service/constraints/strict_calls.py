"""The grammar of an output that may call strict functions: free text, and calls that are valid.

Free text has no mark that the parser of calls reads as one, and does not begin with JSON, which the
parser reads as a call, too. So whatever the parser finds has passed the schema. Knows no request.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.openai.tools.formats import FORMATS, REASONING_FORMATS, ToolFormat
from service.constraints.grammars import JSON_OPTIONS
from service.constraints.schemas import enforceable

#: The begin of JSON that may be calls.
_JSON = r"[ \n\r\t]*[{\[]"
#: White space between a mark and JSON; the parser accepts more.
_SPACE = r"/[ \n\r\t]{1,8}/"


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How one model writes calls.

    `special` has the ids of marks, of calls and of reasoning, that are special tokens: no text can
    be one of these.
    """

    format: ToolFormat
    special: Mapping[str, int]


def call_marks(template_text: str, special: Mapping[str, int]) -> CallMarks | None:
    """The marks of calls that a chat template writes; None if calls cannot be told from text.

    `special` has the ids of the tokenizer's special tokens.
    """
    found = [one for one in FORMATS if one.begin in template_text]
    if any(one.separator and one.separator in template_text for one in found):
        return None
    for one in found:
        if one.shape:
            marks = {mark for each in REASONING_FORMATS for mark in each.marks}
            known = {*marks, one.begin, *one.ends}
            return CallMarks(one, {text: id_ for text, id_ in special.items() if text in known})
    return None


def strict_grammar(
    marks: CallMarks, schema_of_call: Mapping[str, Any], *, is_parallel: bool
) -> str:
    """The grammar, in the syntax of Lark. SchemaRefused if a schema cannot be enforced."""
    schema = dict(schema_of_call)
    if marks.format.shape == "list":
        definitions = schema.pop("$defs", {})
        most = {} if is_parallel else {"maxItems": 1}
        schema = {"type": "array", "items": schema, "minItems": 1, **most, "$defs": definitions}
    written = json.dumps(enforceable(schema) | {"x-guidance": dict(JSON_OPTIONS)})
    begin, ends = marks.format.begin, marks.format.ends
    # A list of calls ends with its bracket, and the mark after it may be left out.
    end = "".join(
        f" SPACE? {_mark(one, marks)}" for one in ends[:1] if marks.format.shape != "list"
    )
    # One complement each: with two, the library takes a text for possible that it cannot be.
    wrong = f"(?s:.*)(({_any_of(_marks_of_calls())})|({_any_of(_before_content())}){_JSON})(?s:.*)"
    lines = [
        f"call: SPACE? json{end}",
        f"SPACE: {_SPACE}",
        f"json: %json {written}",
        f"FREE: /(?s:.*)/ & ~/{wrong}/",
        f"FIRST: /(?s:.*)/ & ~/({wrong})|({_JSON}(?s:.*))/",
    ]
    many = "*" if is_parallel else "?"
    if begin in marks.special:
        others = [id_ for text, id_ in marks.special.items() if text not in (begin, *ends)]
        mark = " | ".join(f"<[{id_}]>" for id_ in others)
        between = " (mark FIRST?)*" if others else ""
        lines += [f"mark: {mark}"] if others else []
        start = f"start: FIRST?{between} ({_mark(begin, marks)} call FREE?){many}"
    else:
        quoted = json.dumps(begin)
        lines += [
            "first_call[lazy]: FIRST_CALL",
            f"FIRST_CALL: FIRST {quoted}",
            "next_call[lazy]: NEXT_CALL",
            f"NEXT_CALL: FREE {quoted}",
        ]
        more = "(next_call call)* " if is_parallel else ""
        start = f"start: first_call call {more}FREE? | FIRST?"
    return "\n".join([start, *lines])


def _mark(text: str, marks: CallMarks) -> str:
    return f"<[{marks.special[text]}]>" if text in marks.special else json.dumps(text)


def _marks_of_calls() -> Iterable[str]:
    return dict.fromkeys(one.begin for one in FORMATS)


def _before_content() -> Iterable[str]:
    """The marks after which an output may begin with JSON, as it may at its start."""
    return [mark for one in REASONING_FORMATS for mark in (one.end, *one.around[:1])]


def _any_of(texts: Iterable[str] | Sequence[str]) -> str:
    # Not re.escape: in the library's syntax, an escaped `<` is the begin of a word.
    return "|".join(re.sub(r"[\\.^$|?*+(){}\[\]/]", r"\\\g<0>", text) for text in texts)
