"""The fields of a body of `/v1/responses`, except its input, and their place in a chat.

Says which fields exist and which of their values Quire has a meaning for. sampling.py checks those
that a chat has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, StrictStr, field_validator

from quire.errors import InvalidRequest
from quire.openai.metadata import metadata_of
from quire.wire.body_fields import UNSUPPORTED_IN_RESPONSES, changes_nothing, why_refused
from quire.wire.logprobs import MAX_TOP_LOGPROBS
from quire.wire.refusals import FaultWithin, validated
from quire.wire.sampling import SamplingParams

#: The longest name of a user, a key or an earlier response.
MAX_NAME_LENGTH = 256

#: What `include` may name. The reasoning is always included, and never encrypted.
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")

#: Quire's own fields, which a chat has under the same names.
_PASSED = frozenset(
    {*SamplingParams.model_fields, "chat_template_kwargs", "adapter"}.union(
        {"cache_salt", "structured_outputs"}
    )
    - {"max_tokens", "logprobs", "prompt_logprobs", "json_schema", "json_object"}
)

#: The path of a field in a chat -> its path in a body of this API; the longest beginning counts.
_RENAMED = {
    "body.max_completion_tokens": "body.max_output_tokens",
    "body.max_tokens": "body.max_output_tokens",
    "body.messages": "body.input",
    "body.response_format.json_schema": "body.text.format",
    "body.response_format": "body.text.format",
    "body.logprobs": "body.top_logprobs",
    "body.tool_choice.function": "body.tool_choice",
}

_Name = Annotated[str, Strict(), Field(max_length=MAX_NAME_LENGTH)]
_Count = Annotated[int, Strict(), Field(ge=1, lt=1 << 53)]


class Reasoning(BaseModel):
    """The field `reasoning`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Text(BaseModel):
    """The field `text`. Quire's models know no verbosity, so it has its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(BaseModel):
    """The field `stream_options`. Events are never padded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_obfuscation: Literal[False] | None = None


class Fields(BaseModel):
    """The checked fields. `input`, `tools` and `tool_choice` are checked elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: StrictStr | None = None
    input: Any = None
    instructions: StrictStr | None = None
    previous_response_id: _Name | None = None
    store: StrictBool | None = None
    background: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    max_output_tokens: _Count | None = None
    max_tool_calls: _Count | None = None
    top_logprobs: Annotated[int, Strict(), Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: _Name | None = None
    safety_identifier: _Name | None = None
    prompt_cache_key: _Name | None = None

    @field_validator("include")
    @classmethod
    def _known_includes(cls, value: list[str] | None) -> list[str] | None:
        for index, name in enumerate(value or ()):
            if name not in _INCLUDES:
                raise FaultWithin(str(index), f"must be one of {', '.join(_INCLUDES)}")
        return value

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def read_fields(body: Mapping[str, Any]) -> tuple[Fields, dict[str, Any]]:
    """The fields, and those of Quire's own, which go to the chat as they are. InvalidRequest."""
    own: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for name, value in body.items():
        if name in UNSUPPORTED_IN_RESPONSES:
            if not changes_nothing(UNSUPPORTED_IN_RESPONSES, name, value):
                reason = why_refused(UNSUPPORTED_IN_RESPONSES, name, known=())
                raise InvalidRequest(f"body.{name}", reason)
        elif name in _PASSED:
            passed[name] = value
        else:
            own[name] = value
    if isinstance(own.get("truncation"), str) and own["truncation"] == "auto":
        message = "must be disabled: Quire never drops a part of an input"
        raise InvalidRequest("body.truncation", message)
    own["metadata"] = metadata_of(own.get("metadata"))
    fields = validated(Fields, own, prefix="body.")
    if fields.input is None:
        raise InvalidRequest("body.input", "is missing")
    if fields.background and not fields.is_stored:
        raise InvalidRequest("body.background", "needs store to be true")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("body.stream_options", "needs stream to be true")
    return fields, passed


def chat_fields(fields: Fields) -> dict[str, Any]:
    """The fields of a chat that these fields are, except messages and functions."""
    chat: dict[str, Any] = {}
    if fields.model is not None:
        chat["model"] = fields.model
    if fields.max_output_tokens is not None:
        chat["max_completion_tokens"] = fields.max_output_tokens
    if fields.has_logprobs:
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    text_format = fields.text.format if fields.text is not None else None
    if text_format is not None and text_format.get("type") != "text":
        chat["response_format"] = _response_format(text_format)
    return chat


def template_arguments(fields: Fields, given: object) -> object:
    """`chat_template_kwargs` with the effort of the reasoning, unless the caller sets them.

    Templates of models that reason read one of these names; other templates ignore them.
    """
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    if effort is None or not isinstance(given, Mapping | None):
        return given
    implied: dict[str, Any] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return implied | dict(given or {})


def path_in_response(field: str) -> str:
    """The path in this API of a field that an error of a chat names."""
    if field.startswith("body.tools."):
        # Functions of chats are in a map of their own.
        return field.replace(".function.", ".", 1).removesuffix(".function")
    for chat, own in _RENAMED.items():
        if field == chat or field.startswith(f"{chat}."):
            if own == "body.input":
                # A message is made of several items, or several messages of one.
                return own
            return own + field.removeprefix(chat)
    return field


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` as a chat's `response_format`: the schema is in a map of its own there."""
    if text_format.get("type") != "json_schema":
        return dict(text_format)
    described = {name: value for name, value in text_format.items() if name != "type"}
    if not isinstance(described.get("name"), str):
        raise InvalidRequest("body.text.format.name", "must be a string")
    return {"type": "json_schema", "json_schema": described}
