"""Constraints on the output of a generation: a JSON schema, a regex, a choice of texts, a grammar.

Reads what a caller may write, in our parameters and in OpenAI's `response_format`, and refuses what
no worker could serve. Does not know the library that enforces a constraint: only workers have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

from quire.errors import InvalidRequest, ProtocolError
from quire.wire.codec import pack, unpack
from quire.wire.json_text import read_object

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

#: The sampling parameters that constrain the output; a request has at most one of them.
CONSTRAINTS: Final[tuple[Kind, ...]] = get_args(Kind)

#: The most bytes of an encoded constraint: the time to compile it grows with its size.
MAX_CONSTRAINT_BYTES = 1 << 16

#: The most bytes of an encoded JSON schema: much of it may be descriptions.
MAX_SCHEMA_BYTES = 1 << 18

#: The most nested maps and lists of a schema; libraries that read it fail at about 128.
MAX_SCHEMA_DEPTH = 100

#: The most texts of a `choice`.
MAX_CHOICES = 1024

#: vLLM's fields of a body, and those of its `structured_outputs` -> our parameter.
_GUIDED: Final[Mapping[str, Kind]] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED: Final[Mapping[str, Kind]] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}

#: The fields in which a body may have a constraint, besides the parameters themselves.
CONSTRAINT_FIELDS = ("response_format", "structured_outputs", *_GUIDED)

#: An index in a JSON pointer; with more digits than any list of a constraint needs.
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

#: Keywords whose value is data. A reference in it is none.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
#: Keywords whose value is a map from names to schemas. The names are no keywords.
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)

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
        is_compact: JSON has no white space but a space after `,` and `:`.
    """

    kind: Kind
    value: Any
    field: str
    is_compact: bool = False


def constraint_of(fields: Mapping[str, Any], *, written_as: str | None = None) -> Constraint | None:
    """The constraint in `fields`, the checked sampling parameters of a body; None without one.

    `written_as` is the field in which the caller wrote it, if that is not the parameter's own.
    """
    name = next((name for name in CONSTRAINTS if fields[name]), None)
    if name is None:
        return None
    return Constraint(name, fields[name], written_as or f"body.{name}")


class Written(NamedTuple):
    """Sampling parameters that the caller wrote in another field, and the path of that field."""

    fields: Mapping[str, Any]
    path: str | None


def written_elsewhere(body: Mapping[str, Any]) -> Written:
    """The constraint in OpenAI's `response_format` or in a field of vLLM's. InvalidRequest.

    The error names the field. At most one of these fields, and no parameter of ours, may be set.
    """
    found = [("body.response_format", fields_of_response_format(body)), *_of_vllm(body)]
    given = [(path, fields) for path, fields in found if fields]
    if not given:
        return Written({}, None)
    path, fields = given[0]
    own = next((name for name in CONSTRAINTS if body.get(name) not in (None, False)), None)
    other = own or (given[1][0].removeprefix("body.") if len(given) > 1 else None)
    if other is not None:
        raise InvalidRequest(path, f"cannot be combined with {other}")
    return Written(fields, path)


def _of_vllm(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """For each constraint in vLLM's fields its path, and the parameter of ours that it is."""
    for name, own in _GUIDED.items():
        if body.get(name) is not None:
            yield f"body.{name}", _parameter(own, body[name], f"body.{name}")
    given, field = body.get("structured_outputs"), "body.structured_outputs"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise InvalidRequest(field, "must be a map")
    for name, value in given.items():
        if name not in _STRUCTURED and value not in (None, False):
            message = f"is not supported: these are: {', '.join(_STRUCTURED)}"
            raise InvalidRequest(f"{field}.{name}", message)
    set_ones = [name for name in _STRUCTURED if given.get(name) not in (None, False)]
    if len(set_ones) != 1:
        raise InvalidRequest(field, f"must have one of {', '.join(_STRUCTURED)}")
    (name,) = set_ones
    path = f"{field}.{name}"
    yield path, _parameter(_STRUCTURED[name], given[name], path)


def _parameter(name: Kind, value: Any, path: str) -> Mapping[str, Any]:
    """The value as the parameter. vLLM takes a schema as JSON text, too."""
    if name == "json_schema" and isinstance(value, str):
        try:
            read, fault = read_object(value)
        except InvalidRequest as error:
            raise InvalidRequest(path, error.message) from None
        if fault is not None:
            raise InvalidRequest(f"{path}.{fault.path}", fault.message)
        value = read
    return {name: value}


def checked(value: Any, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Any:
    """Returns the value of a constraint. ValueError if it cannot be encoded and decoded again."""
    if _is_deeper(value, MAX_SCHEMA_DEPTH):
        raise ValueError(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    try:
        unpack(pack(value, max_bytes=max_bytes))
        json.dumps(value, allow_nan=False)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    except (ProtocolError, TypeError) as error:
        raise ValueError(f"cannot be sent: {error}") from error
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether maps and lists are nested more than `levels` deep. Not recursive: depth is input.

    False without a look at all of it if it has more values than a constraint may have bytes.
    """
    level, num_values = [value], 0
    for _ in range(levels):
        inner = [one.values() if isinstance(one, dict) else one for one in level if _holds(one)]
        level = [child for children in inner for child in children]
        num_values += len(level)
        if num_values > MAX_SCHEMA_BYTES:
            return False
    return any(map(_holds, level))


def _holds(value: object) -> bool:
    return isinstance(value, dict | list | tuple)


def resolve(root: Mapping[str, Any], reference: str) -> Any:
    """The schema that a reference (`#` and a JSON pointer, RFC 6901) refers to; None if none is."""
    if not _is_followed(reference):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list | tuple) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found if isinstance(found, Mapping | bool) else None


def moved(schema: Any, home: str) -> Any:
    """The schema with its references to its own root changed to `home`; its data is unchanged."""
    if isinstance(schema, list):
        return [moved(one, home) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _moved_keyword(name, value, home) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and _is_followed(reference):
        found["$ref"] = home + reference[1:]
    return found


def _is_followed(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _moved_keyword(name: str, value: Any, home: str) -> Any:
    if name in _DATA:
        return value
    if name in _NAMED and isinstance(value, Mapping):
        return {key: moved(one, home) for key, one in value.items()}
    return moved(value, home)


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
