"""A text that comes in chunks, and the steps by which a parser reads it.

Each step is a generator, which waits at a `yield` until there is more text. What a step reads is a
function of the text alone, however it was cut into chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: A step that returns a value, and waits for text at each `yield`.
Reading = Generator[None, None, _T]

#: The longest name of a function, in characters, as in OpenAI's API.
MAX_NAME_LENGTH = 64
#: The most characters of a key or a name in JSON, with escapes and the second quote.
MAX_STRING_LENGTH = 6 * MAX_NAME_LENGTH + 1
#: The most adjacent spaces within a call, and the most that are dropped before a mark. All text
#: that may still be content is searched again with each chunk, so there must not be much of it.
MAX_SPACE = 256
#: The most characters of a value that is read before the name of its call is known.
MAX_EARLY_LENGTH = 1 << 16

_SPACES = " \t\r\n"
_SPACE = re.compile(f"[{_SPACES}]*")
_NAME = re.compile(r"[a-zA-Z0-9_-]*")
#: The rest of a JSON string behind its first quote.
_REST_OF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
#: What changes the depth within a JSON value, or begins a string. Python has two kinds of strings.
_STRUCTURE = re.compile(r"""["'{}\[\]]""")
_END_OF_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_END_OF_SCALAR = re.compile(rf"[,}}\]{_SPACES}]")


class Malformed(Exception):
    """The text is not what its beginning promised."""


class TextBuffer:
    """The text that has not been taken yet. `_at` is the index of the next character to read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_taken = 0

    @property
    def num_read(self) -> int:
        """How many characters have been read, taken ones included."""
        return self._num_taken + self._at

    def append(self, text: str) -> None:
        """Add the next chunk."""
        self._text += text

    def take(self) -> str:
        """What has been read and not been taken."""
        taken, self._text = self._text[: self._at], self._text[self._at :]
        self._num_taken += self._at
        self._at = 0
        return taken

    def take_all(self) -> str:
        """All text that has not been taken."""
        self._at = len(self._text)
        return self.take()

    def drop(self) -> None:
        """Forget what has been read."""
        self.take()

    def unread(self) -> None:
        """Read again from what has not been taken."""
        self._at = 0

    def peek(self) -> Reading[str]:
        """The next character, which stays unread."""
        while self._at >= len(self._text):
            yield
        return self._text[self._at]

    def drop_space(self) -> Reading[None]:
        """Drops what has been read, and spaces up to a character that is none."""
        while True:
            self._at = _end_of_space(self._text, self._at)
            self.drop()
            if self._text:
                return
            yield

    def skip_space(self) -> Reading[None]:
        """Reads spaces up to a character that is none. Malformed if there are too many."""
        begin = self._at
        while True:
            self._at = min(_end_of_space(self._text, self._at), begin + MAX_SPACE)
            if self._at == begin + MAX_SPACE:
                raise Malformed
            if self._at < len(self._text):
                return
            yield

    def skip(self, mark: str) -> Reading[bool]:
        """Reads the mark, if it comes next. Returns whether it does."""
        while True:
            if self._text.startswith(mark, self._at):
                self._at += len(mark)
                return True
            if not mark.startswith(self._text[self._at : self._at + len(mark)]):
                return False
            yield

    def expect(self, mark: str) -> Reading[None]:
        """Reads the mark. Malformed if another text comes next."""
        if not (yield from self.skip(mark)):
            raise Malformed

    def until(self, mark: str, *, at_most: int) -> Reading[str]:
        """Reads up to the mark and over it. Malformed if more than `at_most` characters precede."""
        limit = self._at + at_most + len(mark)
        while True:
            end = self._text.find(mark, self._at, limit)
            if end >= 0:
                found = self._text[self._at : end]
                self._at = end + len(mark)
                return found
            if len(self._text) >= limit:
                raise Malformed
            yield

    def string(self) -> Reading[str]:
        """Reads a short JSON string. Malformed if it is none, or longer than MAX_STRING_LENGTH."""
        yield from self.expect('"')
        limit = self._at + MAX_STRING_LENGTH
        while True:
            match = _REST_OF_STRING.match(self._text, self._at, limit)
            if match:
                self._at = match.end()
                return string_of('"' + match.group())
            if len(self._text) >= limit:
                raise Malformed
            yield

    def value(self) -> Reading[str]:
        """Reads a JSON value as it stands. Malformed if it is longer than MAX_EARLY_LENGTH."""
        begin, reading = self._at, self.skip_value()
        limit = begin + MAX_EARLY_LENGTH
        for _ in reading:
            if self._at > limit:
                break
            yield
        if self._at > limit:
            self._at = limit
            raise Malformed
        return self._text[begin : self._at]

    def skip_value(self) -> Reading[None]:
        """Reads a JSON value; what is read at a `yield` may be taken. Checks its brackets only."""
        first = yield from self.peek()
        if first not in "{[\"'":
            yield from self._skip_scalar()
            return
        depth, quote = 0, ""
        while True:
            pattern = _END_OF_STRING[quote] if quote else _STRUCTURE
            match = pattern.search(self._text, self._at)
            if not match:
                self._at = len(self._text)
                yield
                continue
            self._at = match.end()
            if match.group() == "\\":
                yield from self.peek()
                self._at += 1
            elif match.group() in _END_OF_STRING:
                quote = "" if quote else match.group()
            else:
                depth += 1 if match.group() in "{[" else -1
            if not depth and not quote:
                return

    def _skip_scalar(self) -> Reading[None]:
        if _END_OF_SCALAR.match(self._text, self._at):
            raise Malformed
        while not (match := _END_OF_SCALAR.search(self._text, self._at)):
            self._at = len(self._text)
            yield
        self._at = match.start()

    def word(self) -> Reading[str]:
        """Reads a name up to another character, which stays unread; Malformed if it is too long."""
        begin = self._at
        while True:
            match = _NAME.match(self._text, begin)
            assert match is not None, "the pattern matches an empty text"
            if match.end() - begin > MAX_NAME_LENGTH:
                raise Malformed
            if match.end() < len(self._text):
                self._at = match.end()
                return match.group()
            yield

    def before_mark(self, marks: Sequence[str], *, keeps_space: bool = False) -> tuple[str, str]:
        """Takes the text that certainly precedes the first mark, and reads the mark if it is there.

        Returns both; the mark may be empty. Unless it `keeps_space`, spaces before a mark, up to
        MAX_SPACE, are in neither, and are read with the mark. Drops what has been read before.
        """
        self.drop()
        found = min(
            ((at, mark) for mark in marks if (at := self._text.find(mark)) >= 0),
            default=(len(self._text) - _length_of_start(self._text, marks), ""),
        )
        end, mark = found
        num_kept = end if keeps_space else len(self._text[:end].rstrip(_SPACES))
        self._at = max(num_kept, end - MAX_SPACE)
        text = self.take()
        if mark:
            self._at = end - len(text) + len(mark)
        return text, mark


def string_of(text: str) -> str:
    """The string that a JSON text stands for. Malformed if it is none."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        raise Malformed from None
    assert isinstance(found, str), "the text is in quotes"
    return found


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "the pattern matches an empty text"
    return match.end()


def _length_of_start(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of the text with which one of the marks begins."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
