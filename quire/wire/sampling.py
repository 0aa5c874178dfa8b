"""The body of a request: the sampling parameters, and the bodies of OpenAI's API.

The names and ranges of the parameters are vLLM's. An unknown field that could change the result is
refused by name: to ignore it would give wrong results. An unsupported field of OpenAI's whose value
changes nothing is ignored, because many programs send all fields of that API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from quire.errors import InvalidRequest
from quire.wire.adapters import named_adapter
from quire.wire.body_fields import (
    KNOWN_FIELDS,
    UNSUPPORTED,
    changes_nothing,
    check_options,
    told_prompt_of,
    why_refused,
)
from quire.wire.chat_messages import checked_messages, template_settings_of
from quire.wire.codec import MAX_ARRAY_LENGTH, MAX_TOKEN_ID, is_token_ids, without_numpy
from quire.wire.constraints import (
    CONSTRAINTS,
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_SCHEMA_BYTES,
    Constraint,
    Written,
    checked,
    constraint_of,
    written_elsewhere,
)
from quire.wire.logprobs import MAX_TOP_LOGPROBS, check_prompt_logprobs, logprobs_of_chat
from quire.wire.pooling import PoolingParams, parse_pooling
from quire.wire.refusals import FaultWithin, validated
from quire.wire.tools import ToolUse, template_arguments_of, tool_use_of

#: The most stop strings, and the most characters of each: all are searched at every token.
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256

#: The most stop token ids.
MAX_STOP_TOKEN_IDS = 256

#: The most tokens that one request may allow or bias, and the largest bias, as in OpenAI's API.
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0

#: The most digits of a token id as a key. To convert far longer ones would take long.
MAX_DIGITS = len(str(MAX_TOKEN_ID))

#: The most characters of a wrong key that an error names.
MAX_SHOWN_KEY = 64

#: Beyond these, logits leave the range of single precision, and samples are noise.
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01

GeneratingKind = Literal["tokens", "completions", "chat.completions"]
# Flat: pydantic puts the members of a union into the path of an error.
Kind = Literal["tokens", "completions", "chat.completions", "embeddings", "scores"]

_Int = Annotated[int, Strict()]
_Float = Annotated[float, Strict()]
_Bool = Annotated[bool, Strict()]
_StopString = Annotated[str, Strict(), Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Text = Annotated[str, Strict(), Field(min_length=1)]
_TokenId = Annotated[int, Strict(), Field(ge=0, le=MAX_TOKEN_ID)]
_Bias = Annotated[float, Strict(), Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


class SamplingParams(BaseModel):
    """How the next token is chosen and when the generation stops, in the form of the wire."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    max_tokens: _Int | None = Field(default=None, ge=1, lt=1 << 63)
    """The most tokens of the output; unset: the rest of the context, or what the queue sets."""
    min_tokens: _Int = Field(default=0, ge=0, lt=1 << 63)
    """No end-of-sequence token, stop token or stop string ends the output earlier."""
    temperature: _Float = Field(default=1.0, ge=0.0, le=MAX_TEMPERATURE)
    """0 takes the likeliest token; the higher, the more random is the choice."""
    top_k: _Int = Field(default=0, ge=-1, lt=1 << 63)
    """Sample from this many of the likeliest tokens; 0 and -1 keep all."""
    top_p: _Float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the likeliest tokens that together reach this probability; 1 keeps all."""
    min_p: _Float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: _Float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=2.0)
    """Above 1, tokens that prompt or output already have become less likely."""
    presence_penalty: _Float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted once from the logit of each token that the output has."""
    frequency_penalty: _Float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each time that the output has it."""
    allowed_token_ids: tuple[_TokenId, ...] = Field(default=(), max_length=MAX_ALLOWED_TOKEN_IDS)
    """The only tokens that may be sampled; every token if left out."""
    logit_bias: dict[_TokenId, _Bias] = Field(default_factory=dict, max_length=MAX_BIASED_TOKENS)
    """Token id to the number added to its logit. Keys in a body are decimal strings."""
    json_schema: dict[str, Any] | None = None
    """The output is JSON that this schema accepts. At most one of the five constraints."""
    json_object: _Bool = False
    """The output is a JSON object."""
    regex: _Text | None = None
    """The whole output matches this regular expression."""
    choice: tuple[_Text, ...] = Field(default=(), max_length=MAX_CHOICES)
    """The output is one of these texts."""
    grammar: _Text | None = None
    """The output follows this grammar, in the syntax of Lark."""
    json_whitespace: Literal["none", "any"] | None = None
    """In JSON, white space as `json.dumps` writes (`none`, which clients set), or `any`."""
    seed: _Int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    """Seed of the noise. The client draws one at submit, so that a takeover has the same seed."""
    logprobs: _Int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Publish each token's log-probability, and those of this many likeliest; unset: none."""
    prompt_logprobs: _Int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """The same of each token of the prompt, for its place in the prompt; unset: none."""
    stop: tuple[_StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    """Texts that end the output."""
    stop_token_ids: tuple[_TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    """Tokens that end the output."""
    ignore_eos: _Bool = False
    """Do not end at the model's end-of-sequence token."""
    include_stop_str_in_output: _Bool = False
    """Keep the stop string that ended the output in its text."""
    skip_special_tokens: _Bool = True
    """Leave the model's control tokens out of the text."""

    @model_validator(mode="before")
    @classmethod
    def _values_are_pythons(cls, values: object) -> object:
        return without_numpy(values)

    @field_validator("json_schema", mode="before")
    @classmethod
    def _a_class_has_a_schema(cls, value: object) -> object:
        if isinstance(value, type) and issubclass(value, BaseModel):
            return value.model_json_schema()
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_a_list_of_one(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, Iterable):
            return value
        raise ValueError("must be a string or a list of strings")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _keys_are_token_ids(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        biases: dict[int, object] = {}
        for key, bias in value.items():
            token_id = _token_id(key)
            if token_id in biases:
                raise FaultWithin(str(token_id), "names this token twice")
            biases[token_id] = bias
        return biases

    @field_validator("top_k")
    @classmethod
    def _minus_one_is_zero(cls, value: int) -> int:
        return max(value, 0)

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")
        if most is not None and value > most:
            raise ValueError("min_tokens is greater than max_tokens")
        return value

    @field_validator(
        "allowed_token_ids", "choice", "json_schema", "regex", "grammar", mode="before"
    )
    @classmethod
    def _restricts_to_something(cls, value: object) -> object:
        # A caller whose list is empty by mistake must not get unrestricted output.
        if isinstance(value, str | list | tuple | Mapping) and not value:
            raise ValueError("must not be empty; leave it out for no restriction")
        return value

    @field_validator(*CONSTRAINTS)
    @classmethod
    def _the_only_constraint(cls, value: Any, info: ValidationInfo) -> Any:
        others = [name for name in CONSTRAINTS if name != info.field_name and info.data.get(name)]
        if value and others:
            raise ValueError(f"cannot be combined with {others[0]}")
        is_schema = info.field_name == "json_schema"
        return checked(value, max_bytes=MAX_SCHEMA_BYTES if is_schema else MAX_CONSTRAINT_BYTES)

    @field_validator("ignore_eos")
    @classmethod
    def _ends_where_its_constraint_does(cls, value: object, info: ValidationInfo) -> object:
        found = next((name for name in CONSTRAINTS if info.data.get(name)), None)
        if value and found is not None:
            raise ValueError(f"cannot be combined with {found}, which determines the end")
        return value

    def to_body(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in the form of a body."""
        fields = self.model_dump(exclude_defaults=True)
        if biases := fields.get("logit_bias"):
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in biases.items()}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}


def _token_id(key: object) -> int:
    """Reads a key of `logit_bias`: an integer, or a decimal string without leading zeros."""
    if isinstance(key, str):
        is_number = key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS
        if is_number and key == str(int(key)):
            key = int(key)
    if type(key) is int and 0 <= key <= MAX_TOKEN_ID:
        return key
    raise FaultWithin(str(key)[:MAX_SHOWN_KEY], "is no token id in digits without leading zeros")


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body that has been checked. Exactly one of `prompt` and `messages` is not None.

    `pooling` says which vector is wanted; None for an output.
    `tools`, `template_arguments` and `template_settings` are for the chat template.
    Of the prompt's tokens, only the last `max_prompt_tokens` are kept, or the first ones if it
    `keeps_beginning`; None keeps all. The log tells its ids, their number, or nothing of it.
    Requests with another `cache_salt` do not share cached prefixes with this one.
    `model` may include the name of an adapter. Only a worker that serves the model can tell; see
    `quire.wire.adapters`.
    """

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    sampling: SamplingParams
    model: str | None = None
    adapter: str | None = None
    constraint: Constraint | None = None
    tools: ToolUse | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    template_settings: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    keeps_beginning: bool = False
    cache_salt: str = ""
    told_prompt: Literal["", "ids", "number"] = ""
    pooling: PoolingParams | None = None
    #: The bytes of pictures that came with the body, by digest; a body of the queue has none.
    pictures: Mapping[str, bytes] = field(default_factory=dict)


def parse_body(kind: Kind, body: Mapping[str, Any]) -> ParsedBody:
    """Checks a body of the given kind. InvalidRequest names the first fault as `body.<field>`."""
    if kind == "embeddings" or kind == "scores":
        prompt, pooling = parse_pooling(kind, body)
        model, adapter = _model_of(body), named_adapter(body)
        return ParsedBody(prompt, None, SamplingParams(), model, adapter, pooling=pooling)
    subject = "messages" if kind == "chat.completions" else "prompt"
    known = KNOWN_FIELDS[kind] | SamplingParams.model_fields.keys()
    others = UNSUPPORTED[kind]
    for name, value in body.items():
        if name not in known and name != subject and not changes_nothing(others, name, value):
            reason = why_refused(others, name, known=SamplingParams.model_fields)
            raise InvalidRequest(f"body.{name}", reason)
    if body.get("n") not in (None, 1) or isinstance(body.get("n"), bool):
        raise InvalidRequest("body.n", "must be 1; each choice is a request of its own")
    model = _model_of(body)
    written = written_elsewhere(body)
    try:
        fields = _sampling_fields(kind, body) | dict(written.fields)
        sampling = validated(SamplingParams, fields, prefix="body.")
    except InvalidRequest as error:
        raise _as_written(error, body, written) from None
    parameters: dict[str, Any] = {name: getattr(sampling, name) for name in CONSTRAINTS}
    constraint = constraint_of(parameters, written_as=written.path)
    check_options(body)
    parsed = partial(
        ParsedBody,
        model=model,
        adapter=named_adapter(body),
        max_prompt_tokens=body.get("truncate_prompt_tokens"),
        keeps_beginning=body.get("truncation_side") == "right",
        cache_salt=body.get("cache_salt") or "",
        told_prompt=told_prompt_of(body),
    )
    if kind != "chat.completions":
        prompt = _prompt(kind, body.get("prompt"))
        if not isinstance(prompt, str):
            # Of a text, only a worker knows how many tokens it has.
            longest = body.get("truncate_prompt_tokens") or len(prompt)
            check_prompt_logprobs(min(len(prompt), longest), sampling.prompt_logprobs)
        return parsed(prompt, None, sampling, constraint=constraint)
    return _parsed_chat(body, sampling, constraint, parsed)


def _as_written(error: InvalidRequest, body: Mapping[str, Any], written: Written) -> InvalidRequest:
    """The error with the name of the field that the caller wrote."""
    if error.field == "body.max_tokens" and body.get("max_tokens") is None:
        return InvalidRequest("body.max_completion_tokens", error.message)
    own = next(iter(written.fields), None)
    if written.path is not None and own is not None:
        name, _, rest = error.field.removeprefix("body.").partition(".")
        if name == own:
            return InvalidRequest(f"{written.path}.{rest}".rstrip("."), error.message)
    return error


def _parsed_chat(
    body: Mapping[str, Any],
    sampling: SamplingParams,
    constraint: Constraint | None,
    parsed: Callable[..., ParsedBody],
) -> ParsedBody:
    messages, tools = checked_messages(body.get("messages")), tool_use_of(body)
    if tools is not None:
        constraint = _constraint_with(tools, constraint, sampling)
    return parsed(
        None,
        messages,
        sampling,
        constraint=constraint,
        tools=tools,
        template_arguments=template_arguments_of(body),
        template_settings=template_settings_of(body, messages),
    )


def _model_of(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    if model is None or (isinstance(model, str) and model):
        return model
    raise InvalidRequest("body.model", "must be a non-empty string")


def _constraint_with(
    tools: ToolUse, constraint: Constraint | None, sampling: SamplingParams
) -> Constraint | None:
    """The constraint of a request with functions. InvalidRequest if it cannot have both.

    With functions that may be called, it is that on the content, which an output with calls lacks.
    """
    if constraint is not None and constraint.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(constraint.field, "cannot be combined with tools")
    required = tools.constraint()
    if (required is not None or tools.strict) and sampling.ignore_eos:
        what = "a required call" if required is not None else "a strict function"
        raise InvalidRequest("body.ignore_eos", f"cannot be combined with {what}")
    # An output that must call has no content, which could have a form.
    return required or constraint


def _sampling_fields(kind: GeneratingKind, body: Mapping[str, Any]) -> dict[str, Any]:
    # A null means "the default" in OpenAI's bodies.
    fields = {
        name: body[name] for name in SamplingParams.model_fields if body.get(name) is not None
    }
    alias = body.get("max_completion_tokens")
    if alias is not None and fields.setdefault("max_tokens", alias) != alias:
        raise InvalidRequest("body.max_completion_tokens", "contradicts max_tokens")
    if kind == "chat.completions":
        fields |= {"logprobs": logprobs_of_chat(body)}
    return fields


def _prompt(kind: GeneratingKind, prompt: object) -> str | list[int]:
    if isinstance(prompt, str) and prompt and kind == "completions":
        return prompt
    if isinstance(prompt, list) and 0 < len(prompt) <= MAX_ARRAY_LENGTH and is_token_ids(prompt):
        return prompt
    expected = "a non-empty array of token ids"
    if kind == "completions":
        expected = f"a non-empty string or {expected}"
    raise InvalidRequest("body.prompt", f"must be {expected}")
