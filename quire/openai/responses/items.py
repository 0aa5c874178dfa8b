"""The input items of a response: checked, completed with ids, and as messages of a chat.

Pure functions. An item is a map in OpenAI's form. Fields of an item that Quire does not use are
dropped: callers send back the items of earlier outputs, with whatever their library added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.chat_messages import MAX_CALLS, MAX_MESSAGES
from quire.wire.json_text import read_object
from quire.wire.pictures import PictureSet, bytes_of_url, check_detail

#: The most input items of one response, with those of the responses before it.
MAX_ITEMS = MAX_MESSAGES

#: The most parts of one item.
MAX_PARTS = 1024

#: The longest id of an item or of a call.
MAX_ID_LENGTH = 128

#: The roles of messages. Chat templates do not know `developer`, which is OpenAI's word for system.
_ROLES = ("user", "assistant", "system", "developer")

#: The kinds of parts that have a text.
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

#: The kind of a part that is a picture.
_PICTURE = "input_image"

#: How the ids of items begin.
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def checked_items(given: object, name: str, pictures: PictureSet) -> list[dict[str, Any]]:
    """The items of the field `input`, all with `type`, `id` and `status`. InvalidRequest.

    `name` distinguishes the response: an item without an id gets one made of it and of its index.
    The bytes of pictures go to `pictures`; their parts have a digest in place of them.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_ITEMS:
        message = f"must be a string, or an array of 1 to {MAX_ITEMS} items"
        raise InvalidRequest("body.input", message)
    items: list[dict[str, Any]] = []
    for index, one in enumerate(given):
        field = f"body.input.{index}"
        if not isinstance(one, Mapping):
            raise InvalidRequest(field, "must be a map")
        item = _checked(one, field, pictures)
        own = one.get("id")
        if own is not None:
            item["id"] = _text(own, f"{field}.id", at_most=MAX_ID_LENGTH)
        else:
            item["id"] = f"{_ID_PREFIXES[item['type']]}_{name}i{index}"
        items.append(item | {"status": "completed"})
    return items


def as_input(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output items of a response as input items of the next one.

    A call whose arguments are no JSON, such as one that was cut off, is left out: no chat can hold
    it.
    """
    items: list[dict[str, Any]] = []
    for one in output:
        try:
            item = _checked(one, "", PictureSet())
        except InvalidRequest:
            continue
        items.append(item | {"id": one["id"], "status": one["status"]})
    return items


def check_outputs(context: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """InvalidRequest if an item of `own` is the output of a call that no item before it is."""
    called = {item["call_id"] for item in context if item["type"] == "function_call"}
    for index, item in enumerate(own):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            message = f"no function_call before it has the call_id {item['call_id']!r}"
            raise InvalidRequest(f"body.input.{index}.call_id", message)


def messages_of(
    items: Sequence[Mapping[str, Any]],
    *,
    instructions: str | None,
    pictures: Mapping[str, bytes],
) -> list[dict[str, Any]]:
    """The chat that these items are. `pictures` are those of all items, by digest.

    Adjacent system messages are joined, because many templates accept one, at the beginning.
    Reasoning, text and calls that follow each other are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        _add(item, messages, pictures)
    return messages


def digests_of(items: Iterable[Mapping[str, Any]]) -> list[str]:
    """The digests of the pictures of checked items."""
    parts = (part for item in items for part in item.get("content") or ())
    return [part["sha256"] for part in parts if part["type"] == _PICTURE]


def _add(
    item: Mapping[str, Any], messages: list[dict[str, Any]], pictures: Mapping[str, bytes]
) -> None:
    last = messages[-1] if messages else {}
    of_assistant = last if last.get("role") == "assistant" else None
    kind = item["type"]
    if kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        messages.append(output)
    elif kind == "function_call":
        if of_assistant is None or len(of_assistant.get("tool_calls", ())) >= MAX_CALLS:
            of_assistant = {"role": "assistant", "content": None}
            messages.append(of_assistant)
        # Some templates write the calls of a message only if its content is null.
        of_assistant["content"] = of_assistant["content"] or None
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        of_assistant.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        reasoning = text_of(item["content"] or item["summary"])
        if reasoning:
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    elif item["role"] == "assistant":
        if of_assistant is not None and _is_only_reasoning(of_assistant):
            of_assistant["content"] = text_of(item["content"])
        else:
            messages.append({"role": "assistant", "content": text_of(item["content"])})
    elif item["role"] == "user":
        messages.append({"role": "user", "content": _content_of(item["content"], pictures)})
    elif last.get("role") == "system":
        last["content"] += f"\n\n{text_of(item['content'])}"
    else:
        messages.append({"role": "system", "content": text_of(item["content"])})


def _is_only_reasoning(message: Mapping[str, Any]) -> bool:
    return "reasoning_content" in message and "tool_calls" not in message and not message["content"]


def _content_of(
    parts: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]
) -> str | list[dict[str, Any]]:
    """The content of a chat's message: a text, or parts if there are pictures among them."""
    if all(part["type"] != _PICTURE for part in parts):
        return text_of(parts)
    return [
        {"type": "image_url", "image_url": {"url": pictures[part["sha256"]]}}
        if part["type"] == _PICTURE
        else {"type": "text", "text": text_of([part])}
        for part in parts
    ]


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """The text of all parts."""
    return "".join(part.get("text", part.get("refusal", "")) for part in parts)


def _checked(item: Mapping[str, Any], field: str, pictures: PictureSet) -> dict[str, Any]:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        return _message(item, field, pictures)
    if kind == "function_call":
        return _call(item, field)
    if kind == "function_call_output":
        return _output(item, field)
    if kind == "reasoning":
        return _reasoning(item, field)
    if kind == "item_reference":
        raise InvalidRequest(field, "is a reference: send the item, or a previous_response_id")
    message = "must be message, function_call, function_call_output or reasoning"
    raise InvalidRequest(f"{field}.type", message)


def _message(item: Mapping[str, Any], field: str, pictures: PictureSet) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(_ROLES)}")
    own = "output_text" if role == "assistant" else "input_text"
    taken = pictures if role == "user" else None
    content = _parts(item.get("content"), f"{field}.content", kind=own, pictures=taken)
    return {"type": "message", "role": role, "content": content}


def _call(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    arguments = _text(item.get("arguments"), f"{field}.arguments")
    if arguments.strip():
        try:
            _, fault = read_object(arguments)
        except InvalidRequest as error:
            message = f"must be the JSON text of an object: {error.message}"
            raise InvalidRequest(f"{field}.arguments", message) from None
        if fault is not None:
            raise InvalidRequest(f"{field}.arguments", f"{fault.path} {fault.message}")
    return {
        "type": "function_call",
        "call_id": _text(item.get("call_id"), f"{field}.call_id", at_most=MAX_ID_LENGTH),
        "name": _text(item.get("name"), f"{field}.name", at_most=MAX_ID_LENGTH),
        "arguments": arguments,
    }


def _output(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str):
        output = text_of(_parts(output, f"{field}.output", kind="input_text"))
    return {
        "type": "function_call_output",
        "call_id": _text(item.get("call_id"), f"{field}.call_id", at_most=MAX_ID_LENGTH),
        "output": output,
    }


def _reasoning(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    given = {name: item.get(name) or [] for name in ("summary", "content")}
    kinds = {"summary": "summary_text", "content": "reasoning_text"}
    parts = {
        name: _parts(given[name], f"{field}.{name}", kind=kind) if given[name] else []
        for name, kind in kinds.items()
    }
    return {"type": "reasoning"} | parts


def _parts(
    content: object, field: str, *, kind: str, pictures: PictureSet | None = None
) -> list[dict[str, Any]]:
    """A content as parts; text of any kind becomes a part of `kind`.

    Its pictures go to `pictures`; without that it may have none.
    """
    if isinstance(content, str):
        return [_part(content, kind)]
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        message = f"must be a string or an array of at most {MAX_PARTS} parts"
        raise InvalidRequest(field, message)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        path = f"{field}.{index}"
        if not isinstance(part, Mapping):
            raise InvalidRequest(path, "must be a map")
        told = part.get("type")
        if told == "refusal":
            text = _text(part.get("refusal"), f"{path}.refusal")
            parts.append({"type": "refusal", "refusal": text})
        elif isinstance(told, str) and told in _TEXT_PARTS:
            parts.append(_part(_text(part.get("text"), f"{path}.text"), kind))
        elif told == _PICTURE and pictures is not None:
            parts.append(_picture(part, path, pictures))
        else:
            kinds = kind if pictures is None else f"{kind} or {_PICTURE}"
            raise InvalidRequest(f"{path}.type", f"must be {kinds}")
    return parts


def _picture(part: Mapping[str, Any], field: str, pictures: PictureSet) -> dict[str, Any]:
    """The part with the digest of the picture in place of its data."""
    check_detail(part.get("detail"), f"{field}.detail")
    if part.get("file_id") is not None:
        raise InvalidRequest(f"{field}.file_id", "is not supported: send the data as image_url")
    data = bytes_of_url(part.get("image_url"), f"{field}.image_url")
    digest = pictures.add(data, f"{field}.image_url")["sha256"]
    shown = {"detail": "auto", "file_id": None, "image_url": None}
    return {"type": _PICTURE, "sha256": digest, **shown}


def _part(text: str, kind: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text} | extra


def _text(value: object, field: str, *, at_most: int | None = None) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, "must be a string")
    if at_most is not None and not 0 < len(value) <= at_most:
        raise InvalidRequest(field, f"must have 1 to {at_most} characters")
    return value
