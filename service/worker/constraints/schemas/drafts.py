"""Reads schemas of older drafts of JSON Schema as those of the current one. Knows no library."""

from collections.abc import Mapping, Sequence
from typing import Any


def in_current_draft(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in the current draft of JSON Schema; keywords of older drafts are translated."""
    rewritten = dict(schema)
    more = rewritten.pop("additionalItems", True)
    if isinstance(rewritten.get("items"), list | tuple):
        rewritten["prefixItems"] = rewritten["items"]
        rewritten["items"] = more
    for name, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(rewritten.get(name), bool):
            is_exclusive = rewritten.pop(name)
            if is_exclusive and inclusive in rewritten:
                rewritten[name] = rewritten.pop(inclusive)
    return rewritten


def listed(value: object) -> Sequence[Any]:
    """The values of a keyword that takes one value or a list of them."""
    return value if isinstance(value, list | tuple) else [value]


def texts_of(value: object) -> list[str]:
    """The texts in the value of a keyword that takes a list; none if it is no list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list | tuple) else []
