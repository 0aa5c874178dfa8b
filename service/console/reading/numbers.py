"""Turns a number that no float can hold into a typed error: no program of ours wrote it."""

import contextlib
from collections.abc import Iterator

from quire.errors import ProtocolError


@contextlib.contextmanager
def refusing_huge_numbers() -> Iterator[None]:
    """ProtocolError in place of Python's error for a number that is too large to be computed with.

    Python's integers have no limit, and Redis keeps numbers as texts of any length.
    """
    try:
        yield
    except OverflowError as error:
        raise ProtocolError("a number in this queue is too large to be shown") from error
