"""A call of `/v1/responses`: the chat that it is, and what is kept of it with its results.

Pure functions. What is kept is a map with the fields of the response that never change (`shown`)
and all items that the model was given (`items`), so that any gateway can show the response, list
its input, and continue it, from the record and the log alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidRequest, ProtocolError
from quire.openai.answers import Heading
from quire.openai.responses.fields import (
    Fields,
    chat_fields,
    read_fields,
    template_arguments,
)
from quire.openai.responses.functions import Functions, functions_of
from quire.openai.responses.items import MAX_ITEMS, check_outputs, checked_items, messages_of
from quire.openai.tools.argument_types import ArgumentTypes, argument_types_from
from quire.wire.codec import Unsendable, pack, unpack_map
from quire.wire.pictures import PictureSet

#: The ids of responses: this, and the name of the response. They are ids of requests, too.
ID_PREFIX = "resp_"

#: The length of the name, and the form of the ids that a gateway gives.
NAME_LENGTH = 32
RESPONSE_ID = re.compile(rf"{ID_PREFIX}[0-9a-f]{{{NAME_LENGTH}}}")

#: The version of what is kept.
KEPT_VERSION = 1

#: The fields of a response without which nothing can be made of it.
_KEPT_FIELDS = {"id", "created_at", "background"}

#: What the model sees if the caller sets none of these.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a response.

    `shown` are the fields of the response that never change. `items` are those that the model was
    given, the last `num_own` of them with this response. `tools` are the names of the functions
    that the output may call, and `reasoning` those of the formats of its reasoning.
    """

    shown: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    num_own: int
    tools: tuple[str, ...]
    has_logprobs: bool = False
    reasoning: tuple[str, ...] = ()
    #: The types of the arguments of `tools`.
    types: ArgumentTypes = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.shown["id"])

    @property
    def is_background(self) -> bool:
        return bool(self.shown["background"])

    def check(self) -> None:
        """InvalidRequest, with the caller's field, if the response could not show what it must.

        Also for a response that is not kept: it shows the same fields.
        """
        pack(self.shown, field="body")

    def encode(self) -> bytes:
        """The bytes to keep. InvalidRequest if they are too many, or cannot be sent."""
        self.check()
        fields = {
            "v": KEPT_VERSION,
            "shown": self.shown,
            "items": list(self.items),
            "own": self.num_own,
            "tools": list(self.tools),
            "logprobs": self.has_logprobs,
            "reasoning": list(self.reasoning),
            "types": {name: dict(types) for name, types in self.types.items()},
        }
        try:
            data = pack(fields, field="body.input")
        except Unsendable as error:
            # The path of the error counts the items of earlier responses, too.
            raise InvalidRequest("body.input", error.message) from None
        try:
            unpack_map(data)
        except ProtocolError as error:
            raise InvalidRequest("body", f"cannot be kept: {error}") from error
        return data

    @classmethod
    def decode(cls, data: bytes) -> Kept:
        """ProtocolError if this is not what `encode` makes."""
        fields = unpack_map(data)
        try:
            if fields["v"] != KEPT_VERSION:
                raise ProtocolError(f"what is kept has the unknown version {fields['v']!r}")
            shown, items = dict(fields["shown"]), [dict(item) for item in fields["items"]]
            if not shown.keys() >= _KEPT_FIELDS or not all("id" in item for item in items):
                raise ProtocolError("what is kept has no response")
            return cls(
                shown,
                items,
                int(fields["own"]),
                tuple(map(str, fields["tools"])),
                bool(fields["logprobs"]),
                tuple(map(str, fields.get("reasoning", ()))),
                argument_types_from(fields.get("types")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not what a gateway keeps: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """One call, its fields checked. `chat` is the body of the chat that it is.

    `items` are all that the model is given, the last `num_own` of them with this call.
    """

    fields: Fields
    functions: Functions
    chat: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    num_own: int

    @property
    def is_parallel(self) -> bool:
        return self.fields.parallel_tool_calls is not False

    def kept(self, heading: Heading) -> Kept:
        """What is kept of the call. `heading` is that of the answer to the chat."""
        shown = {"id": heading.id, "created_at": heading.created, "model": heading.model}
        return Kept(
            shown | self._shown(),
            self.items,
            self.num_own,
            heading.tools,
            self.fields.has_logprobs,
            heading.reasoning.names,
            heading.types,
        )

    def _shown(self) -> dict[str, Any]:
        fields = self.fields
        numbers = {
            name: default if self.chat.get(name) is None else self.chat[name]
            for name, default in _DEFAULTS.items()
        }
        reasoning = fields.reasoning
        text_format = fields.text.format if fields.text is not None else None
        return {
            "object": "response",
            "instructions": fields.instructions,
            "previous_response_id": fields.previous_response_id,
            "tools": list(self.functions.tools),
            "tool_choice": self.functions.choice,
            "parallel_tool_calls": self.is_parallel,
            "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "truncation": "disabled",
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "top_logprobs": fields.top_logprobs or 0,
            "store": fields.is_stored,
            "background": bool(fields.background),
            "service_tier": fields.service_tier or "default",
            "metadata": fields.metadata,
            "user": fields.user,
            "safety_identifier": fields.safety_identifier,
            "prompt_cache_key": fields.prompt_cache_key,
            **numbers,
        }


def call_of(
    body: Mapping[str, Any],
    *,
    name: str,
    context: Sequence[Mapping[str, Any]] = (),
    pictures: Mapping[str, bytes] | None = None,
) -> ResponseCall:
    """The call that a body describes. InvalidRequest.

    `name` is that of the response, of which ids of items are made. `context` are the items of the
    response that it continues: its input and its output; `pictures` are those of them, by digest.
    """
    fields, passed = read_fields(body)
    own_pictures = PictureSet()
    own = checked_items(fields.input, name, own_pictures)
    check_outputs(context, own)
    items = [*context, *own]
    if len(items) > MAX_ITEMS:
        message = f"has {len(items)} items with those of the responses before; the most is "
        raise InvalidRequest("body.input", message + str(MAX_ITEMS))
    is_parallel = fields.parallel_tool_calls is not False
    functions = functions_of(fields.tools, fields.tool_choice, is_parallel=is_parallel)
    arguments = template_arguments(fields, passed.get("chat_template_kwargs"))
    chat = {
        **passed,
        **chat_fields(fields),
        **functions.chat,
        "messages": messages_of(
            items,
            instructions=fields.instructions,
            pictures={**(pictures or {}), **own_pictures.by_digest},
        ),
    }
    if arguments is not None:
        chat["chat_template_kwargs"] = arguments
    return ResponseCall(fields, functions, chat, items, len(own))
