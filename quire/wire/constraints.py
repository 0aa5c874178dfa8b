"""Constraints on the output of a generation: a JSON schema, a regex, a choice of texts, a grammar.

Reads what a caller may write, in our parameters and in OpenAI's `response_format`, and refuses what
no worker could serve. Does not know the library that enforces a constraint: only workers have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from quire.errors import InvalidRequest, ProtocolError
from quire.wire.codec import pack, unpack

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

#: The sampling parameters that constrain the output; a request has at most one of them.
CONSTRAINTS: Final[tuple[Kind, ...]] = get_args(Kind)

#: The most bytes of an encoded constraint: the time to compile it grows with its size.
MAX_CONSTRAINT_BYTES = 1 << 16

#: The most nested maps and lists of a schema; libraries that read it fail at about 128.
MAX_SCHEMA_DEPTH = 100

#: The most texts of a `choice`.
MAX_CHOICES = 1024

#: The fields of OpenAI's description of a schema. `strict` has no effect: a schema is always kept.
_FORMAT_FIELDS = frozenset({"name", "description", "schema", "strict"})


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint on an output.

    Args:
        kind: the sampling parameter, which says how to read `value`.
        value: a JSON schema, True (json_object), a regex, a tuple of texts (choice), or a Lark
            grammar.
        field: the field of the body that the caller has set.
    """

    kind: Kind
    value: Any
    field: str


def constraint_of(body: Mapping[str, Any], fields: Mapping[str, Any]) -> Constraint | None:
    """The constraint in `fields`, the checked sampling parameters of `body`; None without one."""
    name = next((name for name in CONSTRAINTS if fields[name]), None)
    if name is None:
        return None
    field = f"body.{name}" if body.get(name) else "body.response_format"
    return Constraint(name, fields[name], field)


def checked(value: Any) -> Any:
    """Returns the value of a constraint. ValueError if it cannot be encoded and decoded again."""
    if _is_deeper(value, MAX_SCHEMA_DEPTH):
        raise ValueError(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    try:
        unpack(pack(value, max_bytes=MAX_CONSTRAINT_BYTES))
        json.dumps(value, allow_nan=False)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    except (ProtocolError, TypeError) as error:
        raise ValueError(f"cannot be sent: {error}") from error
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether maps and lists are nested more than `levels` deep. Not recursive: depth is input."""
    level = [value]
    for _ in range(levels):
        inner = [one.values() if isinstance(one, dict) else one for one in level if _holds(one)]
        level = [child for children in inner for child in children]
    return any(map(_holds, level))


def _holds(value: object) -> bool:
    return isinstance(value, dict | list | tuple)


def fields_of_response_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format` as sampling parameters. InvalidRequest names the field."""
    given = body.get("response_format")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequest("body.response_format", "must be a map")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in ("text", "json_object", "json_schema"):
        message = "must be text, json_object or json_schema"
        raise InvalidRequest("body.response_format.type", message)
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _refuse_unknown(given, known, "body.response_format")
    if kind == "text":
        return {}
    for name in CONSTRAINTS:
        if body.get(name) not in (None, False):
            raise InvalidRequest("body.response_format", f"cannot be combined with {name}")
    if kind == "json_object":
        return {"json_object": True}
    return {"json_schema": _schema(given.get("json_schema"))}


def _schema(described: object) -> Mapping[str, Any]:
    field = "body.response_format.json_schema"
    if not isinstance(described, Mapping):
        raise InvalidRequest(field, "must be a map")
    _refuse_unknown(described, _FORMAT_FIELDS, field)
    if not isinstance(described.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.strict", "must be true or false")
    schema = described.get("schema")
    if not isinstance(schema, Mapping) or not schema:
        raise InvalidRequest(f"{field}.schema", "must be a map that is not empty")
    try:
        return dict(checked(schema))
    except ValueError as error:
        raise InvalidRequest(f"{field}.schema", str(error)) from error


def _refuse_unknown(given: Mapping[str, Any], known: frozenset[str] | set[str], field: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{field}.{name}", "unknown field")
