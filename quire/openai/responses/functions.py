"""The fields `tools` and `tool_choice` of a response, and the functions of the chat that they are.

In this API a function has its name beside its type; in a chat it is a map within the tool. Only the
form is checked here: tools.py checks the functions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.tools import MAX_TOOLS

_FIELDS = ("name", "description", "parameters", "strict")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Functions:
    """What a response may call: `tools` and `choice` as the response shows them, and as a chat."""

    tools: Sequence[Mapping[str, Any]]
    choice: Any
    chat: Mapping[str, Any]


def functions_of(tools: object, choice: object, *, is_parallel: bool) -> Functions:
    """The functions of a body. InvalidRequest."""
    shown = _shown(tools)
    chosen = _chosen(choice, [tool["name"] for tool in shown])
    if not shown:
        if chosen not in ("auto", "none"):
            raise InvalidRequest("body.tool_choice", "needs tools")
        return Functions((), chosen, {})
    chat: dict[str, Any] = {
        "tools": [_of_chat(tool) for tool in shown],
        "tool_choice": chosen,
        "parallel_tool_calls": is_parallel,
    }
    return Functions(shown, choice if choice is not None else "auto", chat)


def _shown(tools: object) -> list[dict[str, Any]]:
    """The tools as a response shows them: with all fields."""
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest("body.tools", f"must be an array of at most {MAX_TOOLS} functions")
    shown: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        field = f"body.tools.{index}"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            message = "must be function: Quire runs no tools of its own"
            raise InvalidRequest(f"{field}.type", message)
        if not isinstance(tool.get("name"), str):
            raise InvalidRequest(f"{field}.name", "must be a string")
        for name in tool:
            if name not in ("type", *_FIELDS):
                raise InvalidRequest(f"{field}.{name}", "unknown field")
        shown.append({"type": "function"} | {name: tool.get(name) for name in _FIELDS})
    return shown


def _of_chat(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in _FIELDS if tool[name] is not None}
    return {"type": "function", "function": function}


def _chosen(choice: object, names: Sequence[str]) -> Any:
    """The `tool_choice` of the chat. InvalidRequest."""
    field = "body.tool_choice"
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in _MODES:
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or kind not in ("function", "allowed_tools"):
        message = f"must be {', '.join(_MODES)}, a function or allowed_tools"
        raise InvalidRequest(field, message)
    if kind == "function":
        if choice.get("name") not in names:
            raise InvalidRequest(f"{field}.name", "must be the name of one of tools")
        return _by_name(choice["name"])
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{field}.mode", "must be auto or required")
    if not isinstance(allowed, list) or not 0 < len(allowed) <= MAX_TOOLS:
        raise InvalidRequest(f"{field}.tools", f"must be an array of 1 to {MAX_TOOLS} functions")
    found = []
    for index, one in enumerate(allowed):
        name = one.get("name") if isinstance(one, Mapping) else None
        if not isinstance(name, str) or name not in names:
            message = "must be the name of one of tools"
            raise InvalidRequest(f"{field}.tools.{index}.name", message)
        found.append(_by_name(name))
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": found}}


def _by_name(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
