"""Turns pydantic's validation errors into messages for the caller who has to correct a field.

Knows no field. Pydantic's own messages speak of inputs, and of tuples where a caller wrote a list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: The length of a name times the total length of the known names may not exceed this: the
#: comparison then takes some hundredths of a second.
MAX_COMPARED_PAIRS = 1 << 17

#: The similarity from 0 to 1 from which a known name is suggested: that of a four-letter word with
#: two letters swapped. Unrelated words with common letters, such as `echo` and `choice`, have less.
MIN_SIMILARITY = 0.75

_Model = TypeVar("_Model", bound=BaseModel)

#: The begin of pydantic's messages: `Input should be`, `String should have` ...
_SUBJECT = re.compile(r"^[A-Z]\w* should ")

#: Pydantic's error types whose message is replaced as a whole.
_SENTENCES: Mapping[str, str] = {
    "string_unicode": "holds half a surrogate pair, which no UTF-8 text can hold",
    "extra_forbidden": "unknown field",
    "missing": "is missing",
    "tuple_type": "must be a list",
}


class FaultWithin(ValueError):
    """A validator's error for a part of its field; `path` is the path of the part in the field."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def validated(
    model: type[_Model], fields: Mapping[str, Any], *, prefix: str = "", context: object = None
) -> _Model:
    """Builds a pydantic model. InvalidRequest for its first ValidationError.

    `context` is passed to the model's validators.
    """
    try:
        return model.model_validate(dict(fields), context=context)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = path_of(first)
        reason = reason_of(first, known=model.model_fields)
        raise InvalidRequest(f"{prefix}{path}" or model.__name__, reason) from None


def path_of(detail: ErrorDetails) -> str:
    """The path of the field at fault, or of a part of it."""
    path = [str(part) for part in detail["loc"]]
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, FaultWithin) and error.path:
        path.append(error.path)
    return ".".join(path)


def reason_of(detail: ErrorDetails, *, known: Collection[str] = ()) -> str:
    """The message that follows the name of the field. `known` are the names of all fields."""
    kind = detail["type"]
    if kind == "extra_forbidden" and detail["loc"]:
        return _SENTENCES[kind] + nearest(str(detail["loc"][-1]), known)
    # Pydantic adds this prefix to the messages of our own validators.
    message = detail["msg"].removeprefix("Value error, ")
    return _SENTENCES.get(kind) or _SUBJECT.sub("must ", message)


def nearest(name: str, known: Collection[str]) -> str:
    """The clause `; did you mean ...?` with the most similar known name; empty if none is similar.

    Also empty if the comparison would take long: the process has other callers to serve.
    """
    if len(name) * sum(map(len, known)) > MAX_COMPARED_PAIRS:
        return ""
    # In lower case, so that `maxTokens` is similar to `max_tokens`.
    names = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=MIN_SIMILARITY)
    # Or a known name begins with this one, as `presence_penalty` with `presence`.
    close += [one for one in names if one.startswith(f"{name.lower()}_")]
    return f"; did you mean {names[close[0]]}?" if close else ""
