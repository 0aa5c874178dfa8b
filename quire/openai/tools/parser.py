"""Splits the text of an output into content, reasoning and tool calls, while it comes.

What is known after some text is a function of that text alone, however it was cut into chunks. So a
reader that begins again gets the same pieces, in the middle of a call, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from quire.openai.tools.argument_types import ArgumentTypes
from quire.openai.tools.formats import FORMATS, ReasoningFormat, ToolFormat
from quire.openai.tools.notation import JsonNotation
from quire.openai.tools.tagged import tagged_arguments
from quire.openai.tools.text_buffer import (
    Malformed,
    Reading,
    TextBuffer,
    string_of,
)

#: The kinds of pieces. `call` has the name of a function, and `arguments` a part of its JSON text.
PieceKind = Literal["content", "reasoning", "call", "arguments"]

#: The most characters that are read at once: each mark is searched for in all that is read.
MAX_CHUNK = 1024

#: The longest header of a message of gpt-oss, in characters.
MAX_HEADER_LENGTH = 256

#: The longest name of a function, with an id after it, in characters.
MAX_NAMED_LENGTH = 128

#: What a call without arguments passes on.
_NO_ARGUMENTS = "{}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the output. `index` counts the calls of the output and is 0 for other kinds."""

    kind: PieceKind
    text: str
    index: int = 0


class ToolCallParser:
    """The pieces of one output.

    - A call is one of the functions that the caller declared, in one of the FORMATS, or as JSON at
      the start of the output. Text that looks like a call, and is none before its name is complete,
      is content.
    - The name of a call comes complete, and its arguments as the model writes them. Nothing checks
      that they are valid JSON: only a constraint can ensure that. Arguments between tags become
      JSON.
    - Space before a call and after it, and space around the reasoning, is dropped.
    - The cost grows with the length of the text.

    `names` are those of the functions, and `types` those of their arguments. `reasoning` are the
    formats that the output may begin with; marks of others are content.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        *,
        types: ArgumentTypes = MappingProxyType({}),
        reasoning: Sequence[ReasoningFormat] = (),
    ) -> None:
        self._names = names
        self._types = types
        self._reasoning = reasoning
        self._text = TextBuffer()
        self._pieces: list[Piece] = []
        #: What text is that has been read and not passed on, if the output ends; None: nothing.
        self._held_kind: PieceKind | None = "content"
        self._num_calls = 0
        #: Of the arguments of the last call.
        self._notation = JsonNotation()
        self._is_after_call = False
        #: Whether all text that follows is content.
        self._is_plain = False
        #: Marks that are dropped from the content.
        self._dropped: tuple[str, ...] = ()
        self._bounds: list[int] = []
        self._reading = self._output()
        next(self._reading)

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._num_calls

    @property
    def is_plain(self) -> bool:
        """Whether all text that follows is content."""
        return self._is_plain

    @property
    def reasoning_bounds(self) -> Sequence[int]:
        """Where reasoning began and ended, by turns, in characters of the output with its marks."""
        return self._bounds

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text. Adjacent ones of one kind are joined."""
        if self._is_plain:
            return [Piece("content", text)] if text else []
        for begin in range(0, len(text), MAX_CHUNK):
            self._text.append(text[begin : begin + MAX_CHUNK])
            next(self._reading)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The rest, if no text follows."""
        self._reading.close()
        held = self._text.take_all()
        if self._held_kind:
            self._emit(self._held_kind, held)
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return [
            Piece(kind, "".join(one.text for one in own), index)
            for (kind, index), own in groupby(pieces, key=lambda one: (one.kind, one.index))
        ]

    def _emit(self, kind: PieceKind, text: str) -> None:
        if kind == "arguments":
            text = self._notation.feed(text)
        if text:
            is_of_call = kind in ("call", "arguments")
            self._pieces.append(Piece(kind, text, self._num_calls - 1 if is_of_call else 0))

    def _output(self) -> Generator[None, None, None]:
        """Reads the whole output. Waits at each `yield` for more text, without an end."""
        if self._reasoning:
            yield from self._attempt(self._read_reasoning(self._reasoning))
        if self._names:
            yield from self._attempt(self._bare_calls())
        elif not self._dropped:
            self._is_plain = True
            yield from self._pass_all()
        while True:
            begin = yield from self._read_content()
            yield from self._attempt(self._calls(begin))

    def _attempt(self, reading: Reading[None]) -> Reading[None]:
        """Reads on; if the text is malformed, what was read and not passed on becomes content."""
        try:
            yield from reading
        except Malformed:
            self._emit("content", self._text.take())
        self._held_kind = "content"

    def _read_reasoning(self, formats: Sequence[ReasoningFormat]) -> Reading[None]:
        """Reads the reasoning, if the output begins with it."""
        yield from self._text.skip_space()
        for one in formats:
            if (yield from self._text.skip(one.begin)):
                break
        else:
            self._text.unread()
            return
        if one.name == "harmony":
            self._text.unread()
            yield from self._harmony()
        self._bounds.append(0)
        yield from self._text.drop_space()
        self._held_kind = "reasoning"
        yield from self._read_until([one.end], kind="reasoning")
        self._bounds.append(self._text.num_read)
        self._held_kind = None
        yield from self._text.drop_space()
        self._held_kind = "content"
        if one.around and (yield from self._text.skip(one.around[0])):
            self._dropped = one.around[1:]
            yield from self._text.drop_space()

    def _harmony(self) -> Reading[None]:
        """Reads the messages of gpt-oss, up to the end of the output.

        Each has a header, which names its channel or the function that it calls. The channel
        `analysis` is reasoning.
        """
        while True:
            header = yield from self._text.until(_MESSAGE, at_most=MAX_HEADER_LENGTH)
            kind: PieceKind = "reasoning" if _ANALYSIS.search(header) else "content"
            if called := _CALLED.search(header):
                self._begin_call(called[1])
                kind = "arguments"
            self._text.drop()
            if kind == "reasoning":
                self._bounds.append(self._text.num_read)
            self._held_kind = kind
            yield from self._read_until(_ENDS_OF_MESSAGE, kind=kind)
            if kind == "reasoning":
                self._bounds.append(self._text.num_read)
            self._held_kind = None

    def _pass_all(self) -> Reading[None]:
        while True:
            self._emit("content", self._text.take_all())
            yield

    def _read_content(self) -> Reading[str]:
        """Reads up to an opening mark, and over it. Returns the mark."""
        while True:
            if self._is_after_call:
                yield from self._text.drop_space()
                self._is_after_call = yield from self._skip_one_of(_ENDS)
                continue
            marks = (*_BEGINS, *_AROUND) if self._names else ()
            mark = yield from self._read_until((*marks, *self._dropped), kind="content")
            if mark in _BEGINS:
                return mark

    def _skip_one_of(self, marks: Sequence[str]) -> Reading[bool]:
        for mark in marks:
            if (yield from self._text.skip(mark)):
                return True
        return False

    def _read_until(self, marks: Sequence[str], *, kind: PieceKind) -> Reading[str]:
        """Passes the text before one of the marks on, and reads the mark."""
        while True:
            text, mark = self._text.before_mark(marks)
            self._emit(kind, text)
            if mark:
                return mark
            yield

    def _bare_calls(self) -> Reading[None]:
        """Reads the calls at the start of an output, if it begins with them."""
        yield from self._text.skip_space()
        # One of the marks begins with a bracket, too.
        is_marked = yield from self._skip_one_of(_BEGINS)
        if not is_marked and (yield from self._text.peek()) in "[{":
            yield from self._json_calls()
        else:
            self._text.unread()

    def _calls(self, begin: str) -> Reading[None]:
        """Reads what follows an opening mark: one call, several, or a list of them."""
        own = [one for one in FORMATS if one.begin == begin]
        yield from self._text.skip_space()
        if (yield from self._text.peek()) in "[{" and any(one.shape in _JSON for one in own):
            yield from self._json_calls()
            return
        for one in own:
            if one.shape not in _JSON and (yield from self._text.skip(one.prefix)):
                yield from self._named_call(one)
                return
        raise Malformed

    def _json_calls(self) -> Reading[None]:
        if (yield from self._text.skip("[")):
            yield from self._object_calls(",")
            yield from self._text.expect("]")
        else:
            # Llama 3 writes several calls with semicolons between them.
            yield from self._object_calls(";")
        self._text.drop()

    def _object_calls(self, separator: str) -> Reading[None]:
        while True:
            yield from self._text.skip_space()
            yield from self._object_call()
            self._is_after_call = True
            yield from self._text.skip_space()
            if not (yield from self._text.skip(separator)):
                return

    def _named_call(self, one: ToolFormat) -> Reading[None]:
        """Reads a call whose name stands before its arguments."""
        if one.tags is None:
            name = yield from self._text.until(one.separator, at_most=MAX_NAMED_LENGTH)
            if one.id_begin:
                # Calls have ids of ours, so that they stay the same at every gateway.
                name = name.partition(one.id_begin)[0]
            self._begin_call(name.strip())
            yield from self._text.drop_space()
            yield from self._pass_arguments()
        else:
            name = yield from self._text.word()
            self._begin_call(name)
            yield from self._text.skip(one.name_end)
            types = self._types.get(name, {})
            emit = partial(self._emit, "arguments")
            yield from tagged_arguments(self._text, one.tags, types, emit)
        self._is_after_call = True

    def _object_call(self) -> Reading[None]:
        """Reads a JSON object with the name and the arguments, in either order."""
        yield from self._text.expect("{")
        is_named, arguments = False, None
        while True:
            key = yield from self._key()
            if key == "name" and not is_named:
                name = yield from self._text.string()
                self._begin_call(name)
                is_named = True
                self._emit("arguments", arguments or "")
            elif key in _ARGUMENTS and arguments is None and is_named:
                arguments = ""
                self._text.drop()
                yield from self._pass_arguments()
            elif key in _ARGUMENTS and arguments is None:
                value = yield from self._text.value()
                arguments = _unquoted(value)
            else:
                yield from self._text.value()
            yield from self._text.skip_space()
            if not (yield from self._text.skip(",")):
                break
        yield from self._text.expect("}")
        if not is_named:
            raise Malformed
        if arguments is None:
            self._emit("arguments", _NO_ARGUMENTS)
        self._text.drop()

    def _key(self) -> Reading[str]:
        yield from self._text.skip_space()
        key = yield from self._text.string()
        yield from self._text.skip_space()
        yield from self._text.expect(":")
        yield from self._text.skip_space()
        return key

    def _begin_call(self, name: str) -> None:
        if name not in self._names:
            raise Malformed
        self._num_calls += 1
        self._notation = JsonNotation()
        self._text.drop()
        self._held_kind = None
        self._emit("call", name)

    def _pass_arguments(self) -> Reading[None]:
        """Passes a JSON value on as it comes. One that is JSON text in a string comes whole."""
        reading = self._text.skip_value()
        if (yield from self._text.peek()) in _QUOTES:
            yield from reading
            self._emit("arguments", _unquoted(self._text.take()))
            return
        for _ in reading:
            self._emit("arguments", self._text.take())
            yield
        self._emit("arguments", self._text.take())


def _unquoted(value: str) -> str:
    """The arguments that a value stands for: some models write their JSON text in a string."""
    return string_of(JsonNotation().feed(value)) if value[0] in _QUOTES else value


_QUOTES = "\"'"
_ARGUMENTS = ("arguments", "parameters")
#: Shapes of calls that are JSON from their opening mark on.
_JSON = ("object", "objects", "list")
_BEGINS = tuple(dict.fromkeys(one.begin for one in FORMATS))
_ENDS = tuple(mark for one in FORMATS for mark in (*one.ends, *one.around))
_AROUND = tuple(dict.fromkeys(mark for one in FORMATS for mark in one.around))
_MESSAGE = "<|message|>"
_ENDS_OF_MESSAGE = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_CALLED = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]+)")
