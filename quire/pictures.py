"""Shows the control characters of texts of others, which a terminal or a page would obey.

Characters that turn the direction of a text around count as well: with them, it could look like
another one. A command protects its terminals where it writes, so that no verb and no error can
forget it. Its pipes and files get every text as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINE_ENDS = (0x2028, 0x2029)
_C1 = range(0x80, 0xA0)
_PICTURES: dict[int, int | str] = {code: 0x2400 + code for code in range(32)}
_PICTURES |= {0x7F: 0x2421} | {code: f"[U+{code:04X}]" for code in (*_C1, *_BIDI, *_LINE_ENDS)}

#: All control characters but tab and line feed, as their pictures or numbers, for `str.translate`.
PICTURES = {code: shown for code, shown in _PICTURES.items() if code not in (9, 10)}


def pictured(text: str) -> str:
    """The text with pictures for its control characters but tab and line feed."""
    return text.translate(PICTURES)


def in_one_line(text: str) -> str:
    """The text with pictures for all its control characters."""
    return text.translate(_PICTURES)


class Terminal:
    """A stream to a terminal. What is written to `raw` is obeyed."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Writes a text with pictures for its control characters."""
        return self.raw.write(pictured(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts in the same way."""
        self.raw.writelines(map(pictured, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def protect_terminals() -> None:
    """From now on stdout and stderr show control characters, if they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, Terminal):
            setattr(sys, name, Terminal(stream))


def raw(stream: TextIO) -> TextIO:
    """The stream that obeys control characters, for those of the command itself."""
    return stream.raw if isinstance(stream, Terminal) else stream
