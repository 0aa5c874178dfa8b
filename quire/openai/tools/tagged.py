"""Reads arguments that stand between tags, and passes them on as JSON while they come.

What is passed on after some text is a function of that text alone, as for the parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from quire.openai.tools.argument_types import OTHERS, TEXT, json_of
from quire.openai.tools.formats import Tags
from quire.openai.tools.text_buffer import MAX_STRING_LENGTH, Reading, TextBuffer


def tagged_arguments(
    text: TextBuffer, tags: Tags, types: Mapping[str, str], emit: Callable[[str], None]
) -> Reading[None]:
    """Reads all arguments of a call, from behind its name to the end tag.

    `types` has the types of the arguments by their names; see argument_types.py. Malformed if a
    tag is missing within an argument.
    """
    emit("{")
    separator = ""
    while True:
        yield from text.skip_space()
        if not (yield from text.skip(tags.key_begin)):
            break
        key = yield from text.until(tags.key_end, at_most=MAX_STRING_LENGTH)
        if tags.value_begin:
            yield from text.skip_space()
            yield from text.expect(tags.value_begin)
        if tags.has_lines:
            yield from text.skip("\n")
        text.drop()
        emit(f"{separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        separator = ", "
        yield from _value(text, tags, types.get(key.strip(), types.get(OTHERS)) or None, emit)
    yield from text.skip(tags.end)
    text.drop()
    emit("}")


def _value(
    text: TextBuffer, tags: Tags, types: str | None, emit: Callable[[str], None]
) -> Reading[None]:
    """Reads a value and its end tag. A text comes as it is written.

    Other values come whole, since their end decides what they are.
    """
    ends = (f"\n{tags.value_end}", tags.value_end) if tags.has_lines else (tags.value_end,)
    if types == TEXT:
        emit('"')
        yield from _until(text, ends, lambda part: emit(json.dumps(part, ensure_ascii=False)[1:-1]))
        emit('"')
        return
    parts: list[str] = []
    if types is not None and TEXT not in types:
        yield from text.drop_space()
        if (yield from text.peek()) in "{[":
            # A text in a map or a list may have the end tag in it.
            for _ in text.skip_value():
                parts.append(text.take())
                yield
            parts.append(text.take())
    yield from _until(text, ends, parts.append)
    emit(json_of("".join(parts), types))


def _until(text: TextBuffer, ends: tuple[str, ...], take: Callable[[str], None]) -> Reading[None]:
    """Takes the text before one of the marks in pieces, and reads the mark."""
    while True:
        part, mark = text.before_mark(ends, keeps_space=True)
        take(part)
        if mark:
            text.drop()
            return
        yield
