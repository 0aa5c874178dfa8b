"""Writes as JSON what a model writes as Python does, while it comes.

Models have seen both, and some write the arguments of a call as a dictionary of Python. Only
quotes, escapes and the three words of Python are changed. JSON stays as it is, and so does what is
neither.
"""

from __future__ import annotations

import json
import re
import sys

#: How Python writes what JSON writes in another way.
WORDS = {"True": "true", "False": "false", "None": "null"}

#: What may be changed outside strings and in them; the `rest` may go on in the text that follows.
_OUTSIDE = re.compile(
    r"""["']|True|False|None|(?P<rest>(?:T(?:ru?)?|F(?:a(?:ls?)?)?|N(?:on?)?)\Z)"""
)
_INSIDE = re.compile(
    r"""["']|\\(?:x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|(?P<rest>(?:x[0-9a-fA-F]?|U[0-9a-fA-F]{0,7})?\Z)|.)""",
    re.DOTALL,
)


class JsonNotation:
    """One value. What has been returned after some text is a function of that text alone."""

    def __init__(self) -> None:
        #: The quote with which the string began that has not ended; empty outside strings.
        self._quote = ""
        self._held = ""

    def feed(self, text: str) -> str:
        """What is certain with this text."""
        text, self._held = self._held + text, ""
        parts: list[str] = []
        at = 0
        while match := (_INSIDE if self._quote else _OUTSIDE).search(text, at):
            parts.append(text[at : match.start()])
            at = match.end()
            if match.lastgroup == "rest":
                self._held = match.group()
                break
            parts.append(self._written(match.group()))
        return "".join([*parts, text[at:]])

    def _written(self, found: str) -> str:
        if found in WORDS:
            return WORDS[found]
        if found[0] == "\\":
            return _escaped(found)
        if self._quote in ("", found):
            self._quote = "" if self._quote else found
            return '"'
        return '\\"' if found == '"' else found


def _escaped(escape: str) -> str:
    """An escape in a string. JSON has neither the quote of Python nor its codes of characters."""
    if escape == "\\'":
        return "'"
    code = int.from_bytes(bytes.fromhex(escape[2:]))
    if len(escape) > 2 and code <= sys.maxunicode:
        return json.dumps(chr(code))[1:-1]
    return escape
