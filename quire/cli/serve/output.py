"""Output that does not end `quire serve` when nobody can see it any more."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from quire.pictures import Terminal, raw

#: What a write fails with when a terminal is closed, and when the reader of a pipe has ended.
_GONE = (errno.EIO, errno.EPIPE)


class Lasting:
    """A stream whose text goes nowhere from the time on when nobody can read it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text. OSError, for instance on a full disk."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._go_nowhere(error)
            return len(text)

    def flush(self) -> None:
        """Writes what is buffered. OSError."""
        try:
            self._stream.flush()
        except OSError as error:
            self._go_nowhere(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _go_nowhere(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        # Under the stream, because its buffer still has the text, and Python flushes it at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside this context, stdout and stderr are such streams."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        lasting = cast("TextIO", Lasting(raw(stream)))
        setattr(sys, name, Terminal(lasting) if isinstance(stream, Terminal) else lasting)
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)
