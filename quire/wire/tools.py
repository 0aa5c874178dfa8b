"""The functions that a chat may call, in OpenAI's form, and what the caller wants of them.

Says which functions an output may call, and builds the schema of an output that must call one. Does
not know how a model writes its calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.constraints import MAX_CONSTRAINT_BYTES, Constraint, checked, moved

#: The most functions of one request, as in OpenAI's API.
MAX_TOOLS = 128

#: The most names in a map `chat_template_kwargs`.
MAX_TEMPLATE_ARGUMENTS = 32

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FIELDS_OF_FUNCTION = frozenset({"name", "description", "parameters", "strict"})
_CHOICES = ("none", "auto", "required")
#: The arguments of a function without parameters.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
#: Variables of chat templates that are no arguments of a caller.
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an output may call.

    `tools` are in OpenAI's form, as templates take them. `required` are the names of which one must
    be called: all of them, the one that the caller chose, or none. `is_parallel`: an output may
    have several calls. `strict` are the names of those whose arguments must be valid whenever they
    are called; with `required`, all must be. `strict_field` is the field that asks for the first of
    them.
    """

    tools: tuple[Mapping[str, Any], ...]
    required: tuple[str, ...] = ()
    is_parallel: bool = True
    strict: tuple[str, ...] = ()
    strict_field: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all functions."""
        return tuple(tool["function"]["name"] for tool in self.tools)

    def constraint(self) -> Constraint | None:
        """The constraint on an output that must call a function; None if it need not.

        Such an output is JSON, whatever the format of the model: an object with the name and the
        arguments, or a list of these. InvalidRequest if the schema is too large.
        """
        if not self.required:
            return None
        field = "body.tools"
        try:
            return Constraint("json_schema", checked(self._schema()), field)
        except ValueError as error:
            raise InvalidRequest(field, str(error)) from error

    def schema_of_call(self) -> dict[str, Any]:
        """The schema of one call of any function: an object with the name and the arguments.

        The arguments of a function that is not strict are any object.
        """
        tools = [
            tool
            if tool["function"]["name"] in self.strict
            else {"function": {"name": tool["function"]["name"], "parameters": {"type": "object"}}}
            for tool in self.tools
        ]
        return ToolUse(tuple(tools), self.names, is_parallel=False)._schema()

    def _schema(self) -> dict[str, Any]:
        functions = [tool["function"] for tool in self.tools]
        definitions: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for function in functions:
            home = function["name"]
            if home not in self.required:
                continue
            parameters = function.get("parameters") or _NO_PARAMETERS
            definitions[home] = moved({"type": "object", **parameters}, f"#/$defs/{home}")
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": home},
                        "arguments": {"$ref": f"#/$defs/{home}"},
                    },
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        one: dict[str, Any] = {"anyOf": calls}
        if self.is_parallel:
            one = {"type": "array", "items": one, "minItems": 1}
        return {**one, "$defs": definitions}


def tool_use_of(body: Mapping[str, Any]) -> ToolUse | None:
    """What a body says about functions; None if the output may call none. InvalidRequest."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InvalidRequest("body.parallel_tool_calls", "must be true or false")
    if tools is None or tools == []:
        if choice not in (None, "none"):
            raise InvalidRequest("body.tool_choice", "needs tools")
        return None
    names = _checked_names(tools)
    allowed, required = _chosen(choice, names)
    if choice == "none":
        return None
    told = {index: tool for index, tool in enumerate(tools) if tool["function"]["name"] in allowed}
    strict = [index for index, tool in told.items() if tool["function"].get("strict")]
    # A function that is named is called once, as OpenAI and vLLM do, also if it is the only one.
    is_named = isinstance(choice, Mapping) and choice["type"] == "function"
    return ToolUse(
        tuple(told.values()),
        required,
        is_parallel=parallel is not False and not is_named,
        strict=() if required else tuple(names[index] for index in strict),
        strict_field=f"body.tools.{strict[0]}.function.strict" if strict else "",
    )


def template_arguments_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The variables that the caller sets in the chat template. InvalidRequest."""
    given, field = body.get("chat_template_kwargs"), "body.chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MAX_TEMPLATE_ARGUMENTS:
        message = f"must be a map with at most {MAX_TEMPLATE_ARGUMENTS} names"
        raise InvalidRequest(field, message)
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(field, "must have names of variables")
        if name in _OWN_VARIABLES or name.endswith("_token"):
            raise InvalidRequest(f"{field}.{name}", "is set by the request or the model")
        if not isinstance(value, str | bool | int | float | None):
            raise InvalidRequest(f"{field}.{name}", "must be a text, a number, a boolean or null")
    return given


def _checked_names(tools: object) -> list[str]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest("body.tools", f"must be an array of at most {MAX_TOOLS} functions")
    names: list[str] = []
    for index, tool in enumerate(tools):
        field = f"body.tools.{index}"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidRequest(f"{field}.type", "must be function")
        _refuse_others(tool, {"type", "function"}, field)
        name = _checked_function(tool.get("function"), f"{field}.function")
        if name in names:
            raise InvalidRequest(f"{field}.function.name", f"{name!r} is used twice")
        names.append(name)
    return names


def _checked_function(function: object, field: str) -> str:
    if not isinstance(function, Mapping):
        raise InvalidRequest(field, "must be a map")
    _refuse_others(function, _FIELDS_OF_FUNCTION, field)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = "must be 1 to 64 letters, digits, underscores or hyphens"
        raise InvalidRequest(f"{field}.name", message)
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{field}.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.strict", "must be true or false")
    if parameters is not None:
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise InvalidRequest(f"{field}.parameters", "must be the JSON schema of an object")
        try:
            checked(parameters, max_bytes=MAX_CONSTRAINT_BYTES)
        except ValueError as error:
            raise InvalidRequest(f"{field}.parameters", str(error)) from error
    return name


def _chosen(choice: object, names: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """The names of the functions that the model is told of, and those of which one must be called.

    InvalidRequest.
    """
    field = "body.tool_choice"
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return names, tuple(names) if choice == "required" else ()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or kind not in ("function", "allowed_tools"):
        message = f"must be {', '.join(_CHOICES)}, a function by its name, or allowed_tools"
        raise InvalidRequest(field, message)
    if kind == "function":
        return names, (_named(choice, names, field),)
    field, given = f"{field}.allowed_tools", choice.get("allowed_tools")
    mode = given.get("mode") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or mode not in ("auto", "required"):
        raise InvalidRequest(f"{field}.mode", "must be auto or required")
    tools = given.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise InvalidRequest(f"{field}.tools", f"must be an array of 1 to {MAX_TOOLS} functions")
    allowed = tuple(_named(one, names, f"{field}.tools.{index}") for index, one in enumerate(tools))
    return allowed, tuple(dict.fromkeys(allowed)) if mode == "required" else ()


def _named(given: object, names: Sequence[str], field: str) -> str:
    """The name of a function of `names` in OpenAI's form. InvalidRequest."""
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest(f"{field}.function.name", "must be the name of one of tools")
    return name


def _refuse_others(given: Mapping[Any, Any], known: frozenset[str] | set[str], field: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{field}.{name}", "unknown field")
