"""The default of `json_whitespace`, which producers write into their requests.

Weak models write white space wherever they may, up to the end of their tokens. A request without
the parameter is one of an earlier version: its output may have any white space, and another worker
must be able to continue it. So the default is in the request, as a drawn seed is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.wire.sampling import ParsedBody

#: The constraints whose output is JSON that is written by a schema.
_OF_JSON = ("json_schema", "json_object")


def with_whitespace(body: dict[str, Any], parsed: ParsedBody) -> tuple[dict[str, Any], ParsedBody]:
    """A body, as it is sent and as it was checked, with the default if its output must be JSON."""
    if parsed.sampling.json_whitespace is not None or not _is_json(parsed):
        return body, parsed
    default = {"json_whitespace": "none"}
    return body | default, replace(parsed, sampling=parsed.sampling.model_copy(update=default))


def _is_json(parsed: ParsedBody) -> bool:
    tools = parsed.tools
    if tools is not None and (tools.required or tools.strict):
        return True
    return parsed.constraint is not None and parsed.constraint.kind in _OF_JSON
