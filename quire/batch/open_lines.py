"""The lines of a run that have no result yet: where they begin, and the memory that they take.

The data of a picture is in memory until the request is in the queue, where the picture then is as
well. If it is needed again, the line is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.batch.answers import LineAnswer, OpenChoice
from quire.batch.files import LineReader
from quire.batch.lines import BadLine, BatchLine
from quire.batch.progress import Position

#: The most requests of one submit, and the most bytes of their lines. One line may have more.
SUBMIT_SIZE = 256
SUBMIT_BYTES = 16 << 20

#: The most bytes of lines in memory. One line may have more.
MAX_OPEN_BYTES = 256 << 20


class _Entry(NamedTuple):
    """Where a line begins, its bytes in the file, and those in memory; was it read again?"""

    begin: Position
    num_bytes: int
    num_held_bytes: int
    was_read_again: bool = False


class OpenLines:
    """The lines that `reader` has read and that have no result, in their order.

    `model` replaces that of each line; None leaves it as it is.
    """

    def __init__(self, reader: LineReader, *, model: str | None) -> None:
        self._reader = reader
        self._model = model
        #: By the digest of the line.
        self._entries: dict[str, _Entry] = {}
        #: The bytes of all of them in memory.
        self._num_held_bytes = 0

    def has_room(self, num_waiting_bytes: int) -> bool:
        """Whether another line may be read, with so many bytes of lines not submitted yet."""
        return self._num_held_bytes < MAX_OPEN_BYTES and num_waiting_bytes < SUBMIT_BYTES

    @property
    def begin(self) -> Position:
        """Where the first of them begins; if there is none, where the next line does."""
        return next((one.begin for one in self._entries.values()), self._reader.end)

    def add(self, line: BatchLine) -> BatchLine:
        """The line that was just read, with its model."""
        begin = self._reader.begin
        num_bytes = self._reader.end.offset - begin.offset
        self._entries[line.digest] = _Entry(begin, num_bytes, num_bytes)
        self._num_held_bytes += num_bytes
        return self._for_model(line)

    def remove(self, line: BatchLine | BadLine) -> None:
        """A line has its result. A bad one was never added."""
        if isinstance(line, BatchLine) and (entry := self._entries.pop(line.digest, None)):
            self._num_held_bytes -= entry.num_held_bytes

    def forget_pictures(self, answer: LineAnswer) -> None:
        """Frees the data of the pictures of a line; `complete` reads it again."""
        line, num_forgotten = answer.line.without_pictures()
        if num_forgotten:
            answer.line = line
            entry = self._entries[line.digest]
            left = entry.num_held_bytes - num_forgotten
            self._entries[line.digest] = entry._replace(num_held_bytes=left)
            self._num_held_bytes -= num_forgotten

    def forget_read_again(self, answer: LineAnswer) -> None:
        """Frees the pictures of a line that was read again for a submit that was refused.

        A line that was never queued keeps them, as `has_room` bounds the bytes of these lines.
        """
        if self._entries[answer.line.digest].was_read_again:
            self.forget_pictures(answer)

    def complete(self, answer: LineAnswer) -> bool:
        """Makes sure that a line has its pictures; False if its file has another line there now."""
        if not answer.line.lacks_pictures:
            return True
        entry = self._entries[answer.line.digest]
        again = self._reader.read_again(entry.begin)
        if not isinstance(again, BatchLine) or again.digest != answer.line.digest:
            return False
        answer.line = self._for_model(again)
        self._num_held_bytes += entry.num_bytes - entry.num_held_bytes
        self._entries[again.digest] = entry._replace(
            num_held_bytes=entry.num_bytes, was_read_again=True
        )
        return True

    def num_bytes_of(self, choices: Iterable[OpenChoice]) -> int:
        """The bytes in the file of the lines of these choices."""
        digests = {one.answer.line.digest for one in choices}
        return sum(self._entries[digest].num_bytes for digest in digests)

    def num_submitted_of(self, choices: Sequence[OpenChoice]) -> int:
        """How many of these choices make one submit: those that fit it, and at least one."""
        last, left = "", SUBMIT_BYTES
        for index, one in enumerate(choices[:SUBMIT_SIZE]):
            digest = one.answer.line.digest
            if digest != last:
                last, left = digest, left - self._entries[digest].num_bytes
            if left < 0 and index:
                return index
        return min(SUBMIT_SIZE, len(choices))

    def _for_model(self, line: BatchLine) -> BatchLine:
        if self._model is None:
            return line
        return replace(line, body={**line.body, "model": self._model})
