"""Says in our words why the library does not compile a constraint. Knows no request.

Its own sentences quote what it has made of a constraint, in many lines, and name options that no
caller has. What is not known here gets a general sentence.
"""

import re
from typing import Final

from quire.wire.constraints import Kind

#: A part of what the library says, and what that means; groups are filled in.
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
#: The place in a grammar, as the library writes it.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\)")


def reason_of(kind: Kind, said: str) -> str:
    """One sentence, to stand behind the name of the field."""
    found = "cannot be compiled"
    for pattern, sentence in _REASONS:
        match = re.search(pattern, said)
        if match:
            found = sentence.format(*match.groups())
            break
    place = _PLACE.match(said)
    if kind == "grammar" and place:
        return f"{found} (line {place[1]}, column {place[2]})"
    return found
