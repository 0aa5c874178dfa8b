"""The files of a batch: what is still to be done, and results that a crash cannot tear apart."""

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
from quire.errors import QuireError

#: The white space of JSON. A line of nothing else is blank, and no request.
BLANKS = " \t\r\n"
_BLANK_BYTES = BLANKS.encode()


class BatchFileError(QuireError):
    """A file of the batch cannot be used as it is; nothing was written."""


class ResultFiles:
    """The output file and the error file of one batch; nobody else may write them meanwhile.

    A line is one write: it is there whole, or, after a crash of the machine, torn at the end of the
    file, where `resume` cuts it off. `lines` are those of the batch, read if there are failures to
    compare them with. A context manager.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        *,
        resume: bool,
        lines: Iterable[BatchLine | BadLine] = (),
    ) -> None:
        # What need not be run again: the `custom_id` of what has completed, and of what has failed
        # the id of its result, which another body would not have.
        self._completed: set[str] = set()
        self._failed: set[str] = set()
        if output.resolve() == errors.resolve():
            raise BatchFileError(f"{output}: output and errors need a file each")
        if not resume and any(path.exists() and path.stat().st_size for path in (output, errors)):
            raise BatchFileError(f"{output} or {errors} has results: --resume, or name others")
        with contextlib.ExitStack() as opened:
            self._output = _open_alone(output)
            opened.callback(os.close, self._output)
            self._errors = _open_alone(errors)
            opened.callback(lambda: os.close(self._errors))
            if resume:
                self._take_up(output, errors, lines)
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
        """Closes both files and gives them free."""
        self._opened.close()

    def write_output(self, line: str) -> None:
        """Appends a line to the output file."""
        _write(self._output, line)

    def write_error(self, line: str) -> None:
        """Appends a line to the error file."""
        _write(self._errors, line)

    @property
    def num_completed(self) -> int:
        """How many lines had completed before."""
        return len(self._completed)

    @property
    def num_failed(self) -> int:
        """How many lines had failed before, and would again."""
        return len(self._failed)

    def has_result_of(self, line: BatchLine | BadLine) -> bool:
        """Whether the line need not be run again."""
        is_completed = isinstance(line, BatchLine) and line.custom_id in self._completed
        return is_completed or line.result_id in self._failed

    def _take_up(self, output: Path, errors: Path, lines: Iterable[BatchLine | BadLine]) -> None:
        _cut_torn_line(self._output)
        _cut_torn_line(self._errors)
        self._completed = {one["custom_id"] for one in _results(output, have_failed=False)}
        stand, num_failures = set(), 0
        for failure in _results(errors, have_failed=True):
            num_failures += 1
            # What the batch's own end broke off is tried again, so it is no error any more.
            if failure["error"]["code"] not in (EXPIRED, CANCELLED):
                stand.add(failure["id"])
        if stand:
            # Nor is that of a line which somebody has mended since: it will have another result.
            self._failed = stand.intersection(line.result_id for line in lines)
        # A file of which all is kept stays as it is, whoever wrote it.
        if len(self._failed) < num_failures:
            failures = _results(errors, have_failed=True)
            kept = [json.dumps(one) + "\n" for one in failures if one["id"] in self._failed]
            before, self._errors = self._errors, _rewritten(errors, self._errors, "".join(kept))
            os.close(before)


def lines_of(source: Path, name: str) -> Iterator[BatchLine | BadLine]:
    """The lines of the file as those of this batch. A repeated `custom_id` is a bad line."""
    taken: set[bytes] = set()
    # Some editors put a mark before the first line. Bytes that are no text come as surrogates.
    # A line ends at LF, or at CR and LF: a lone CR is white space of JSON.
    with source.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip(BLANKS):
                continue
            line = _parsed(text, number=number, batch=name)
            if line.custom_id is not None:
                # Hashes, because a batch may have millions of lines.
                mark = hashlib.sha256(ascii(line.custom_id).encode()).digest()[:16]
                if mark in taken:
                    message = f"line {number}: custom_id {line.custom_id!r} was used before"
                    line = BadLine(number, line.custom_id, "duplicate_custom_id", message)
                taken.add(mark)
            yield line


def unfinished_lines(source: Path, files: ResultFiles, name: str) -> Iterator[BatchLine | BadLine]:
    """Those lines of the file that have no result yet."""
    return (line for line in lines_of(source, name) if not files.has_result_of(line))


def must_be_source(source: Path, *results: Path) -> None:
    """BatchFileError for a file that takes results, too, or cannot be opened, or only once.

    A pipe is empty when its lines have been counted, and the batch would end well with none run.
    """
    if source.resolve() in [path.resolve() for path in results]:
        raise BatchFileError(f"{source}: requests and results need a file each")
    if source.is_fifo() or source.is_char_device():
        raise BatchFileError(f"{source}: is read twice, and a pipe cannot be; name a file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise BatchFileError(f"{source}: {error.strerror}") from error


def count_lines(source: Path) -> int:
    """The lines of the file that are not blank. BatchFileError when it cannot be read."""
    try:
        with source.open("rb") as lines:
            first = next(lines, b"").removeprefix(BOM_UTF8)
            return sum(1 for line in itertools.chain([first], lines) if line.strip(_BLANK_BYTES))
    except OSError as error:
        raise BatchFileError(f"{source}: {error.strerror}") from error


def _parsed(text: str, *, number: int, batch: str) -> BatchLine | BadLine:
    # A letter in the place of what cannot be read would be asked for as if it had been meant.
    try:
        text.encode()
    except UnicodeEncodeError:
        return BadLine(number, None, "invalid_json", f"line {number}: is not UTF-8")
    return parse_line(text, number=number, batch=batch)


def _open_alone(path: Path) -> int:
    if path.is_fifo() or path.is_socket():
        # We would hold its other end, too: what nobody reads would fill it, and then block us.
        raise BatchFileError(f"{path}: results need a file that stays, and a pipe does not")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it locked until now may have put another one in its place.
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(path)
    except OSError as error:
        os.close(descriptor)
        raise BatchFileError(f"{path}: another batch is writing it") from error
    return descriptor


def _rewritten(path: Path, before: int, text: str) -> int:
    """Puts another file with this text in the place of one that is open, and opens that, locked.

    At every moment one of the two is there, whole: whoever is killed here has lost nothing.
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
        # The name must not be on disk before the lines are.
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
    """Cuts off what stands after the last line end."""
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
    """The lines of a file of results. BatchFileError for one that is not of this file."""
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
    """Whether we have written this, to the error file or to the other."""
    match result:
        case {"id": str(), "custom_id": str(), "error": None}:
            return not has_failed
        case {"id": str(), "custom_id": str() | None, "error": {"code": str()}}:
            return has_failed
        case _:
            return False
