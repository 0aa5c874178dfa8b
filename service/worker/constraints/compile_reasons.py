"""Translates the library's compile errors into one sentence. Knows no request.

The library's own errors quote its internal form of the constraint, in many lines, and name options
that callers do not have. An error that is not listed here becomes a general sentence.
"""

import re
from typing import Final

from quire.wire.constraints import Kind

#: A regular expression for the library's error, and our sentence. Groups of the expression replace
#: the braces. The first match decides.
_REASONS: Final[tuple[tuple[str, str], ...]] = (
    ("look-around|lookarounds", "has look-around or a boundary, which cannot be enforced"),
    ("backreferences", "has a reference to a group, which cannot be enforced"),
    ("unclosed character class", "has a class that is not closed"),
    ("unclosed group", "has a group that is not closed"),
    ("unopened group", "closes a group that is not open"),
    ("repetition operator missing expression", "repeats nothing"),
    ("invalid repetition count range|decimal literal", "has a repetition that is no range"),
    ("unrecognized escape sequence", "has an escape that does not exist"),
    ("unrecognized flag", "has a flag that does not exist"),
    ("invalid character class range", "has a range of characters that is empty"),
    (r'unknown name: "([^"\s]{1,60})"', "has no rule or terminal named `{}`"),
    (r"unknown special token: (\S{1,60})", "names a token that the model does not have: {}"),
    (
        "min/maxProperties only supported",
        "has `minProperties` or `maxProperties` beside `properties` that are not all required",
    ),
    (
        "circular references with sibling",
        "has a `$ref` to itself with other keywords beside it, which cannot be enforced",
    ),
    (
        "[Uu]nsatisfiable|^NoExtension|Regex is empty",
        "allows no output that could be enforced",
    ),
    (
        "[Tt]oo many|too (large|complex|deep|big)|limit|fuel|exceeded|Unable to determine",
        "is too complex to be compiled",
    ),
    ("regex parse error|invalid regex", "has a pattern that is not in the syntax of Rust"),
    ("[Ee]xpect|[Ii]nvalid token|parse error", "is not in the syntax of Lark"),
)
#: Line and column in a grammar, as the library writes them.
_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\)")


def reason_of(kind: Kind, error_text: str) -> str:
    """The reason as a sentence that has the name of the field as its subject."""
    reason = "cannot be compiled"
    for pattern, sentence in _REASONS:
        match = re.search(pattern, error_text)
        if match:
            reason = sentence.format(*match.groups())
            break
    position = _POSITION.match(error_text)
    if kind == "grammar" and position:
        return f"{reason} (line {position[1]}, column {position[2]})"
    return reason
