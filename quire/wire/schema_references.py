"""References within a JSON schema: what they refer to, and where they refer to if the schema moves.

A reference is `#` and a JSON pointer (RFC 6901). Others, such as addresses, are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: An index in a JSON pointer; with more digits than any list of a constraint needs.
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

#: Keywords whose value is data. A reference in it is none.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
#: Keywords whose value is a map from names to schemas. The names are no keywords.
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def resolve(root: Mapping[str, Any], reference: str) -> Any:
    """The schema that a reference refers to; None if there is none."""
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
