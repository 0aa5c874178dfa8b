"""The messages of a chat, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.json_text import read_object
from quire.wire.pictures import check_part, must_not_be_many, places_of

#: The most messages of one conversation.
MAX_MESSAGES = 4096

#: The most calls of one message.
MAX_CALLS = 256

#: The most documents of one chat.
MAX_DOCUMENTS = 1024

#: The longest `reasoning_effort`, in characters. Templates differ in the words that they know.
MAX_EFFORT_LENGTH = 32

#: The fields of a body that say how the template renders the messages.
TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "reasoning_effort",
)

#: The fields in which servers send the reasoning of a message; the first one that is not empty
#: counts.
_REASONING = ("reasoning_content", "reasoning")

#: Parts of OpenAI's and vLLM's that no model here reads.
_OTHER_MEDIA = ("audio_url", "file", "image_embeds", "input_audio", "video", "video_url")


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as chat templates take them. InvalidRequest names the path.

    Every message has a content. That of the assistant may be null, also if the caller leaves it out
    beside calls. The arguments of calls are objects: OpenAI's API sends them as JSON text.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest("body.messages", f"must be an array of 1 to {MAX_MESSAGES} messages")
    checked = [_message(one, f"body.messages.{index}") for index, one in enumerate(messages)]
    for number, place in enumerate(places_of(checked), start=1):
        must_not_be_many(number, place.field)
    return checked


def template_settings_of(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """How the chat template renders the messages, if not as usual. InvalidRequest.

    `add_generation_prompt`: whether the beginning of the answer follows. `continue_final_message`:
    the answer goes on with the last message, which stays open. `documents` and `reasoning_effort`
    are variables of some templates.
    """
    found: dict[str, Any] = {}
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(body.get(name), bool | None):
            raise InvalidRequest(f"body.{name}", "must be true or false")
    continues, opens = body.get("continue_final_message"), body.get("add_generation_prompt")
    if continues:
        if opens:
            message = "cannot be combined with add_generation_prompt"
            raise InvalidRequest("body.continue_final_message", message)
        if messages[-1].get("role") != "assistant" or not messages[-1]["content"]:
            message = "needs a last message of the assistant that has a content"
            raise InvalidRequest("body.continue_final_message", message)
        found["continue_final_message"] = True
    if continues or opens is False:
        found["add_generation_prompt"] = False
    if (documents := body.get("documents")) is not None:
        found["documents"] = _documents(documents)
    if (effort := body.get("reasoning_effort")) is not None:
        if not isinstance(effort, str) or not 0 < len(effort) <= MAX_EFFORT_LENGTH:
            raise InvalidRequest("body.reasoning_effort", "must be a short text, such as low")
        found["reasoning_effort"] = effort
    return found


def _documents(documents: object) -> list[dict[str, Any]]:
    if not isinstance(documents, list) or not 0 < len(documents) <= MAX_DOCUMENTS:
        message = f"must be an array of 1 to {MAX_DOCUMENTS} documents"
        raise InvalidRequest("body.documents", message)
    for index, one in enumerate(documents):
        is_map = isinstance(one, dict) and all(isinstance(text, str) for text in one.values())
        if not is_map:
            raise InvalidRequest(f"body.documents.{index}", "must be a map of texts")
    return documents


def _message(message: object, field: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(field, "must be a map")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{field}.role", "must be a string")
    read = dict(message)
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls is not None:
        read["tool_calls"] = _calls(calls, f"{field}.tool_calls")
    if role == "assistant":
        _read_reasoning(read, field)
    if calls:
        read.setdefault("content", None)
    is_null = role == "assistant" and read.get("content", "") is None
    if not is_null:
        _check_content(read.get("content"), role, f"{field}.content")
    return read


def _read_reasoning(read: dict[str, Any], field: str) -> None:
    """Write the reasoning of a message to `reasoning_content`, whatever its field was."""
    for name in _REASONING:
        if not isinstance(read.get(name), str | None):
            raise InvalidRequest(f"{field}.{name}", "must be a string")
    found = next((read[name] for name in _REASONING if read.get(name)), None)
    if found is not None:
        read["reasoning_content"] = found


def _calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequest(field, f"must be an array of at most {MAX_CALLS} calls")
    return [_call(one, f"{field}.{index}") for index, one in enumerate(calls)]


def _call(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{field}.function", "must be a map with name and arguments")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{field}.function.name", "must be a string")
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, field: str) -> dict[str, Any]:
    """The arguments of an earlier call as an object. Its integers are exact."""
    if isinstance(arguments, dict):
        return _json_map(arguments, field)
    if not isinstance(arguments, str):
        raise InvalidRequest(field, "must be the JSON text of an object")
    if not arguments.strip():
        return {}
    try:
        read, fault = read_object(arguments)
    except InvalidRequest as error:
        raise InvalidRequest(
            field, f"must be the JSON text of an object: {error.message}"
        ) from None
    if fault is not None:
        raise InvalidRequest(field, f"{fault.path} {fault.message}")
    return read


def _json_map(arguments: dict[str, Any], field: str) -> dict[str, Any]:
    """Arguments that the caller sent as an object. A Python client may send what JSON has not."""
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"cannot be written as JSON: {error}") from None
    return arguments


def _check_content(content: object, role: str, field: str) -> None:
    """InvalidRequest unless it is a text, or parts that are texts and stored pictures."""
    if isinstance(content, str):
        return
    is_list = isinstance(content, list) and bool(content)
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image":
            check_part(part, role, f"{field}.{index}")
        elif kind in _OTHER_MEDIA:
            message = f"is {kind}: only texts and pictures as image_url are read"
            raise InvalidRequest(f"{field}.{index}.type", message)
        elif kind != "text" or not isinstance(part.get("text"), str):
            is_list = False
    if not is_list:
        raise InvalidRequest(field, "must be a string or an array of texts and pictures")
