"""Writes docs/reference/sampling-parameters.md: `python -m ops.pages.sampling_page`."""

import sys
from collections.abc import Mapping
from typing import Any

from quire.wire.constraints import CONSTRAINTS
from quire.wire.sampling import SamplingParams

#: The words for the types of JSON.
_TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "string": "text",
    "object": "map",
    "array": "list",
}
#: From here on a bound is that of the encoding, not of the parameter.
_ENCODING_BOUND = 1 << 63


def render_markdown() -> str:
    """docs/reference/sampling-parameters.md, whole."""
    properties = SamplingParams.model_json_schema()["properties"]
    lines = [
        "# Sampling parameters",
        "",
        "Generated from the parameters by `python -m ops.pages.sampling_page`; do not edit.",
        "",
        "Give them as `sampling={...}` to the client, or as fields of the body over HTTP and in",
        "batch files. An unknown parameter, a wrong type or a value out of range is refused as",
        "`InvalidRequest` before anything is sent. `quire schema sampling` prints this table as a",
        "JSON schema.",
        "",
        "| parameter | type | range | default | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(name, schema) for name, schema in properties.items()]
    lines += [
        "",
        f"The constraints are {', '.join(f'`{name}`' for name in CONSTRAINTS)}. See",
        "[what is guaranteed](protocol.md#constraints). OpenAI's bodies write some parameters",
        "differently; see [the gateway](gateway.md) and [batch files](../how-to/batch.md).",
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, schema: Mapping[str, Any]) -> str:
    # `X | None` is a choice of two schemas; the one that is not null has the type and the range.
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    (own,) = options
    cells = [f"`{name}`", _type(own), _range(own), _default(name), schema["description"]]
    return f"| {' | '.join(cells)} |"


def _type(schema: Mapping[str, Any]) -> str:
    name = _TYPES[schema["type"]]
    if "items" in schema:
        name += f" of {_TYPES[schema['items']['type']]}s"
    return name


def _range(schema: Mapping[str, Any]) -> str:
    """The bounds of a value, then those of the members of a list or map."""
    parts = [_bounds(schema, "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
    parts.append(_length(schema, "minLength", "maxLength", "characters"))
    parts.append(_length(schema, "minItems", "maxItems", "members"))
    parts.append(_length(schema, "minProperties", "maxProperties", "members"))
    member = schema.get("items", {})
    if not member and isinstance(schema.get("additionalProperties"), dict):
        member = schema["additionalProperties"]
    if bounds := _range(member) if member else "":
        parts.append(f"each {bounds}")
    return "; ".join(part for part in parts if part)


def _bounds(schema: Mapping[str, Any], *names: str) -> str:
    low, above, high, below = (schema.get(name) for name in names)
    if low == -_ENCODING_BOUND:
        return "64 bits, signed"
    high = None if high is not None and high >= _ENCODING_BOUND else high
    below = None if below is not None and below >= _ENCODING_BOUND else below
    if low is not None and high is not None:
        return f"{low:g} to {_number(high)}"
    parts = [f"above {above:g}"] if above is not None else []
    parts += [f"{low:g} or more"] if low is not None else []
    parts += [f"at most {_number(high)}"] if high is not None else []
    parts += [f"below {_number(below)}"] if below is not None else []
    return ", ".join(parts)


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _length(schema: Mapping[str, Any], low: str, high: str, unit: str) -> str:
    if high not in schema:
        return f"{schema[low]} or more {unit}" if low in schema else ""
    return (
        f"{schema[low]} to {schema[high]:,} {unit}"
        if low in schema
        else (f"at most {schema[high]:,} {unit}")
    )


def _default(name: str) -> str:
    value = SamplingParams.model_fields[name].get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "unset" if value in (None, (), {}) else f"{value:g}"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
