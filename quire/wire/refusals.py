"""Says in our words what pydantic found wrong with a field, for whoever has to correct it.

Knows no field. Pydantic speaks of inputs, and of tuples where a caller has written a list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: The most pairs of letters, of a name and of all it is compared with: some hundredths of a second.
MAX_COMPARED_PAIRS = 1 << 17

#: How alike a name must be, from 0 to 1, to be offered: as two of four letters that were swapped.
#: Far below it are words that share letters and no meaning, as `echo` and `choice`.
MIN_LIKENESS = 0.75

#: What pydantic's sentences begin with: `Input should be`, `String should have` ...
_SUBJECT = re.compile(r"^[A-Z]\w* should ")

#: Errors whose sentence is another one altogether.
_SENTENCES: Mapping[str, str] = {
    "string_unicode": "holds half a surrogate pair, which no UTF-8 text can hold",
    "extra_forbidden": "unknown field",
    "missing": "is missing",
    "tuple_type": "must be a list",
}


class FaultWithin(ValueError):
    """What a validator finds wrong with a part of its field; `path` is the place within it."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def path_of(detail: ErrorDetails) -> str:
    """The path of the field that is at fault, or of the part of it."""
    path = [str(part) for part in detail["loc"]]
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, FaultWithin) and error.path:
        path.append(error.path)
    return ".".join(path)


def reason_of(detail: ErrorDetails, *, known: Collection[str] = ()) -> str:
    """What is wrong, to stand behind the name of the field; `known` are the names there are."""
    kind = detail["type"]
    if kind == "extra_forbidden" and detail["loc"]:
        return _SENTENCES[kind] + nearest(str(detail["loc"][-1]), known)
    # A validator of ours says it all; pydantic puts the kind of exception in front of it.
    said = detail["msg"].removeprefix("Value error, ")
    return _SENTENCES.get(kind) or _SUBJECT.sub("must ", said)


def nearest(name: str, known: Collection[str]) -> str:
    """A clause that asks for the nearest of the names there are; empty when none is near.

    Empty as well where that would take long: who refuses has other callers waiting.
    """
    if len(name) * sum(map(len, known)) > MAX_COMPARED_PAIRS:
        return ""
    # `maxTokens` is a way to write it.
    names = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=MIN_LIKENESS)
    # Or the name goes on where it ended, as `presence_penalty` does.
    close += [one for one in names if one.startswith(f"{name.lower()}_")]
    return f"; did you mean {names[close[0]]}?" if close else ""
