"""Finds the patterns of a JSON schema that the library enforces only in part. Knows no schema.

A string in JSON may have escapes. If a character class of a pattern contains a control character,
the library also accepts an escaped quotation mark and an escaped backslash, even if the class does
not contain them.
"""

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

#: Matches the strings that JSON can write without any escape.
NO_ESCAPES = r'^[^\x00-\x1f\x7f"\\]*$'

_CONTROLS = frozenset({*range(32), 127})
_ESCAPED = frozenset(map(ord, '"\\'))
_RELEVANT = _CONTROLS | _ESCAPED
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_SPACES = frozenset(map(ord, "\t\n\r\f\v"))
#: A set operation of Rust's syntax in a class, or a class within a class, in a pattern without its
#: escapes. Python reads these characters as members of the class.
_SET_OPERATION = re.compile(r"\[\^?\]?[^\]]*?(\[|&&|--|~~)")
#: The characters of _RELEVANT in each category such as `\s`. Other categories have none of them.
_CATEGORIES = {
    _constants.CATEGORY_SPACE: _SPACES,
    _constants.CATEGORY_NOT_SPACE: _RELEVANT - _SPACES,
    _constants.CATEGORY_NOT_DIGIT: _RELEVANT,
    _constants.CATEGORY_NOT_WORD: _RELEVANT,
}


def admits_escapes(pattern: str) -> bool:
    """Whether the library may accept an escape that the pattern excludes; True if not known."""
    if _SET_OPERATION.search(re.sub(r"\\.", "e", pattern, flags=re.DOTALL)):
        return True
    try:
        parsed = _parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError):
        return True
    return any(found & _CONTROLS and not found >= _ESCAPED for found in _classes(parsed))


def _classes(parsed: Any) -> Iterator[frozenset[int]]:
    """For each part that matches one character, the characters of _RELEVANT that it matches."""
    pending = list(parsed)
    while pending:
        operation, argument = pending.pop()
        if operation is _constants.IN:
            yield _class(argument)
        elif operation is _constants.LITERAL:
            yield _RELEVANT & {argument}
        elif operation is _constants.NOT_LITERAL:
            yield _RELEVANT - {argument}
        elif operation is _constants.ANY:
            yield _RELEVANT - {ord("\n")}
        elif operation is _constants.BRANCH:
            pending += [one for branch in argument[1] for one in branch]
        elif operation in (_constants.SUBPATTERN, *_REPEATS):
            pending += list(argument[-1])
        elif operation is not _constants.AT:
            # The library does not support it, and refuses the pattern itself.
            yield _CONTROLS


def _class(items: Any) -> frozenset[int]:
    found: set[int] = set()
    for operation, argument in items:
        if operation is _constants.LITERAL:
            found.add(argument)
        elif operation is _constants.RANGE:
            found |= {code for code in _RELEVANT if argument[0] <= code <= argument[1]}
        elif operation is _constants.CATEGORY:
            found |= _CATEGORIES.get(argument, frozenset())
    is_negated = items[0][0] is _constants.NEGATE
    return _RELEVANT - found if is_negated else _RELEVANT & found
