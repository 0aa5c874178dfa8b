"""The files of a batch: lines without a result yet, and result files that survive a crash."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import stat
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.batch.lines import CANCELLED, EXPIRED, BadLine, BatchLine, parse_line
from quire.batch.progress import FIRST, Position, TokenCounts
from quire.errors import QuireError

#: The white space of JSON. A line of white space alone is blank and is skipped.
BLANKS = " \t\r\n"
_BLANK_BYTES = BLANKS.encode()


class BatchFileError(QuireError):
    """A file of the batch cannot be used as it is; nothing was written."""


class ResultFiles:
    """The output file and the error file of one batch, locked against other writers.

    Each line is written with one call. After a crash of the machine the last line may be
    incomplete; `resume` cuts it off. `lines` are the lines of the batch, read only if there are
    earlier failures to compare them with; None if the input cannot have changed since. A context
    manager.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        *,
        resume: bool,
        lines: Iterable[BatchLine | BadLine] | None = (),
    ) -> None:
        #: The tokens of the results of earlier runs.
        self.usage = TokenCounts()
        # Lines that are not run again. Completed ones by `custom_id`. Failed ones by the id of
        # their result, which depends on the body: a corrected line has another one and runs.
        self._completed: set[str] = set()
        self._failed: set[str] = set()
        if output.resolve() == errors.resolve():
            raise BatchFileError(f"{output}: output and errors need two different files")
        if not resume and any(path.exists() and path.stat().st_size for path in (output, errors)):
            message = f"{output} or {errors} has results: use --resume or name other files"
            raise BatchFileError(message)
        with contextlib.ExitStack() as opened:
            self._output = _open_alone(output)
            opened.callback(os.close, self._output)
            self._errors = _open_alone(errors)
            opened.callback(lambda: os.close(self._errors))
            if resume:
                self._load_results(output, errors, lines)
            self._opened = opened.pop_all()

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes both files, which unlocks them."""
        self._opened.close()

    def sync(self) -> None:
        """Returns when everything that was written is on the disk."""
        os.fsync(self._output)
        os.fsync(self._errors)

    def write_output(self, line: str) -> None:
        """Appends a line to the output file."""
        _write(self._output, line)

    def write_error(self, line: str) -> None:
        """Appends a line to the error file."""
        _write(self._errors, line)

    @property
    def num_completed(self) -> int:
        """How many lines completed in earlier runs."""
        return len(self._completed)

    @property
    def num_failed(self) -> int:
        """How many lines failed in earlier runs and are not run again."""
        return len(self._failed)

    def has_result_of(self, line: BatchLine | BadLine) -> bool:
        """Whether the line has a final result, so that it is not run again."""
        is_completed = isinstance(line, BatchLine) and line.custom_id in self._completed
        return is_completed or line.result_id in self._failed

    def _load_results(
        self, output: Path, errors: Path, lines: Iterable[BatchLine | BadLine] | None
    ) -> None:
        _cut_torn_line(self._output)
        _cut_torn_line(self._errors)
        for result in _results(output, have_failed=False):
            self._completed.add(result["custom_id"])
            self.usage += TokenCounts.of(result["response"]["body"]["usage"])
        final, num_failures = set(), 0
        for failure in _results(errors, have_failed=True):
            num_failures += 1
            # Lines that the end of the batch interrupted run again, so their errors are removed.
            if failure["error"]["code"] not in (EXPIRED, CANCELLED):
                final.add(failure["id"])
        if lines is None:
            self._failed = final
        elif final:
            # So is the error of a line that was corrected since: it has another result id.
            self._failed = final.intersection(line.result_id for line in lines)
        # If all errors are kept, the file is not rewritten.
        if len(self._failed) < num_failures:
            failures = _results(errors, have_failed=True)
            kept = [json.dumps(one) + "\n" for one in failures if one["id"] in self._failed]
            before, self._errors = self._errors, _rewritten(errors, self._errors, "".join(kept))
            os.close(before)


class LineReader:
    """Reads the lines of the batch `name` from a file, from `start` on: an iterator.

    A `custom_id` that is repeated after `start` is a bad line. Blank lines are skipped.
    """

    def __init__(self, source: Path, name: str, *, start: Position = FIRST) -> None:
        self._name = name
        #: Where the line begins that was read last, and where it ends.
        self.begin = self.end = start
        self._taken: set[bytes] = set()
        self._source = source
        self._lines = self._read(source)

    def read_again(self, begin: Position) -> BatchLine | BadLine:
        """The line that begins there, which was read before; another one if the file has changed.

        OSError.
        """
        with self._source.open("rb") as lines:
            lines.seek(begin.offset)
            text = _text_of(lines.readline(), begin)
        return _parsed(text, number=begin.number + 1, batch=self._name)

    def __iter__(self) -> LineReader:
        return self

    def __next__(self) -> BatchLine | BadLine:
        return next(self._lines)

    def _read(self, source: Path) -> Iterator[BatchLine | BadLine]:
        with source.open("rb") as lines:
            lines.seek(self.end.offset)
            # A line ends with LF, or CR and LF. A CR alone is white space in JSON.
            for data in lines:
                self.begin = self.end
                self.end = Position(self.begin.offset + len(data), self.begin.number + 1)
                text = _text_of(data, self.begin)
                if text.strip(BLANKS):
                    yield self._parsed(text)

    def _parsed(self, text: str) -> BatchLine | BadLine:
        number = self.end.number
        line = _parsed(text, number=number, batch=self._name)
        if line.custom_id is None:
            return line
        digest = digest_of(line.custom_id)
        if digest in self._taken:
            message = f"line {number}: custom_id {line.custom_id!r} was used before"
            return BadLine(number, line.custom_id, "duplicate_custom_id", message)
        self._taken.add(digest)
        return line


def _text_of(data: bytes, begin: Position) -> str:
    """The text of a line, without the byte order mark of some editors. Bad bytes are surrogates."""
    text = data.removeprefix(BOM_UTF8) if begin.offset == 0 else data
    return text.decode(errors="surrogateescape")


def digest_of(custom_id: str) -> bytes:
    """A hash of a `custom_id`: it needs less memory, and a batch may have millions of lines."""
    return hashlib.sha256(ascii(custom_id).encode()).digest()[:16]


def lines_of(source: Path, name: str) -> LineReader:
    """Reads the lines of the batch `name` from a file. A repeated `custom_id` is a bad line."""
    return LineReader(source, name)


def must_be_source(source: Path, *results: Path) -> None:
    """BatchFileError if the input is also a result file, cannot be opened, or is a pipe.

    The input is read twice. A pipe would be empty after its lines have been counted, and the batch
    would seem to succeed without a single request.
    """
    if source.resolve() in [path.resolve() for path in results]:
        raise BatchFileError(f"{source}: requests and results need different files")
    if source.is_fifo() or source.is_char_device():
        raise BatchFileError(f"{source}: must be a regular file, because it is read twice")
    try:
        source.open("rb").close()
    except OSError as error:
        raise BatchFileError(f"{source}: {error.strerror}") from error


def count_lines(source: Path) -> int:
    """The number of lines that are not blank. BatchFileError when the file cannot be read."""
    try:
        with source.open("rb") as lines:
            first = next(lines, b"").removeprefix(BOM_UTF8)
            return sum(1 for line in itertools.chain([first], lines) if line.strip(_BLANK_BYTES))
    except OSError as error:
        raise BatchFileError(f"{source}: {error.strerror}") from error


def _parsed(text: str, *, number: int, batch: str) -> BatchLine | BadLine:
    # Refused, because a replacement character would change the prompt without notice.
    try:
        text.encode()
    except UnicodeEncodeError:
        return BadLine(number, None, "invalid_json", f"line {number}: is not UTF-8")
    return parse_line(text, number=number, batch=batch)


def _open_alone(path: Path) -> int:
    if path.is_fifo() or path.is_socket():
        # Opened for reading and writing, a pipe without a reader would fill and then block us.
        raise BatchFileError(f"{path}: results need a regular file, not a pipe")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder of the lock may have replaced the file; then this is the old one.
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(path)
    except OSError as error:
        os.close(descriptor)
        raise BatchFileError(f"{path}: another batch is writing it") from error
    return descriptor


def _rewritten(path: Path, before: int, text: str) -> int:
    """Replaces the open file `before` by a new one with this text; returns it, open and locked.

    The replacement is atomic: after a kill at any moment, either the old or the new file is there,
    complete.
    """
    path = path.resolve()
    new = path.with_name(f"{path.name}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        descriptor = os.open(new, flags, 0o644)
    except OSError as error:
        raise BatchFileError(f"{new}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(before).st_mode))
        _write(descriptor, text)
        # The lines must be on disk before the rename is.
        os.fsync(descriptor)
        new.replace(path)
    except BaseException:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        raise
    return descriptor


def _write(descriptor: int, text: str) -> None:
    data = memoryview(text.encode())
    while data:
        data = data[os.write(descriptor, data) :]


def _cut_torn_line(descriptor: int) -> None:
    """Truncates the file after its last line end."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - (1 << 16))
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


def _results(path: Path, *, have_failed: bool) -> Iterator[dict[str, Any]]:
    """The results in a file. BatchFileError for a line that is not a result of this kind."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                result = json.loads(line)
            except ValueError:
                result = None
            if not _is_result(result, has_failed=have_failed):
                kind = "errors" if have_failed else "results"
                raise BatchFileError(f"{path}:{number} is not one of the {kind} of a batch")
            yield result


def _is_result(result: Any, *, has_failed: bool) -> bool:
    """Whether this is a line as we write it: to the error file, or to the output file."""
    match result:
        case {"id": str(), "custom_id": str(), "error": None}:
            return not has_failed
        case {"id": str(), "custom_id": str() | None, "error": {"code": str()}}:
            return has_failed
        case _:
            return False
