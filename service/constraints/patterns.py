"""Which patterns of a JSON schema the library enforces by half. Knows no schema.

A text in JSON may have escapes. Where a pattern has a class with a control character, the library
lets in an escaped quotation mark and an escaped backslash, whether the class has them or not.
"""

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

#: Matches the texts that are written in JSON without any escape.
NO_ESCAPES = r'^[^\x00-\x1f\x7f"\\]*$'

_CONTROLS = frozenset({*range(32), 127})
_ESCAPED = frozenset(map(ord, '"\\'))
_TELLING = _CONTROLS | _ESCAPED
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_SPACES = frozenset(map(ord, "\t\n\r\f\v"))
#: Those of the characters above that a class by name has; the others by name are letters, digits.
_CATEGORIES = {
    _constants.CATEGORY_SPACE: _SPACES,
    _constants.CATEGORY_NOT_SPACE: _TELLING - _SPACES,
    _constants.CATEGORY_NOT_DIGIT: _TELLING,
    _constants.CATEGORY_NOT_WORD: _TELLING,
}


def lets_escapes_in(pattern: str) -> bool:
    """Whether a pattern may let in an escape that it does not match; True if that is not known."""
    try:
        parsed = _parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError):
        return True
    return any(found & _CONTROLS and not found >= _ESCAPED for found in _classes(parsed))


def _classes(parsed: Any) -> Iterator[frozenset[int]]:
    """For each place for one character, which of those that tell may stand there."""
    due = list(parsed)
    while due:
        operation, argument = due.pop()
        if operation is _constants.IN:
            yield _class(argument)
        elif operation is _constants.LITERAL:
            yield _TELLING & {argument}
        elif operation is _constants.NOT_LITERAL:
            yield _TELLING - {argument}
        elif operation is _constants.ANY:
            yield _TELLING - {ord("\n")}
        elif operation is _constants.BRANCH:
            due += [one for branch in argument[1] for one in branch]
        elif operation in (_constants.SUBPATTERN, *_REPEATS):
            due += list(argument[-1])
        elif operation is not _constants.AT:
            # Nothing that the library knows: let it say so.
            yield _CONTROLS


def _class(items: Any) -> frozenset[int]:
    found: set[int] = set()
    for operation, argument in items:
        if operation is _constants.LITERAL:
            found.add(argument)
        elif operation is _constants.RANGE:
            found |= {code for code in _TELLING if argument[0] <= code <= argument[1]}
        elif operation is _constants.CATEGORY:
            found |= _CATEGORIES.get(argument, frozenset())
    is_negated = items[0][0] is _constants.NEGATE
    return _TELLING - found if is_negated else _TELLING & found
