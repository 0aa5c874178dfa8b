"""The fields of a body beside the sampling parameters: those that it may have, and the others.

Knows OpenAI's API and vLLM's. Many programs send all fields that they know, so a field that is not
supported is ignored if its value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import InvalidRequest
from quire.wire.chat_messages import TEMPLATE_FIELDS
from quire.wire.codec import MAX_ARRAY_LENGTH
from quire.wire.constraints import CONSTRAINT_FIELDS
from quire.wire.refusals import nearest

#: The longest `cache_salt`, in characters.
MAX_SALT_LENGTH = 1024

#: The sides of a prompt from which tokens that are too many are taken; the first is the default.
TRUNCATION_SIDES = ("left", "right")

#: OpenAI's tiers. The gateway makes priorities of them.
SERVICE_TIERS = ("auto", "default", "flex", "priority")

_OF_ALL = frozenset(
    {"model", "adapter", "stream", "stream_options", "user", "n", "max_completion_tokens"}
)
_OF_CALLS = _OF_ALL | {
    *CONSTRAINT_FIELDS,
    "truncate_prompt_tokens",
    "truncation_side",
    "cache_salt",
    "return_token_ids",
    "service_tier",
}

#: The fields that a body of a kind may have, besides the parameters and its prompt or messages.
KNOWN_FIELDS: Mapping[str, frozenset[str]] = {
    "tokens": _OF_ALL,
    "completions": _OF_CALLS,
    # prompt_cache_key and safety_identifier identify the user, as `user` does.
    "chat.completions": _OF_CALLS
    | {"top_logprobs", "prompt_cache_key", "safety_identifier"}
    | {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
    | {"include_reasoning", *TEMPLATE_FIELDS},
}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field, the values that change nothing and so are accepted, and why others are refused."""

    harmless: tuple[object, ...] = ()
    reason: str = "is not supported"


#: Fields of vLLM's for calls of every kind.
_OF_ANY: Mapping[str, Unsupported] = {
    "mm_processor_kwargs": Unsupported(
        ({},), "is not supported: the model says how pictures are read"
    ),
    "priority": Unsupported(
        (0,), "is not supported: use service_tier or the header X-Quire-Priority"
    ),
    "request_id": Unsupported(
        (), "is not supported: the header Idempotency-Key makes a call repeatable"
    ),
}
_RENDERS = "is not supported: there is no path that renders a prompt alone"
_OWN_TEMPLATE = "is not supported: only the model's own template is run"
_SESSION = "is not supported: use the header X-Quire-Session"

#: Fields of vLLM's for chats and completions.
_OF_VLLM: Mapping[str, Unsupported] = {
    **_OF_ANY,
    "bad_words": Unsupported(
        ([],), "is not supported, as a word may be several tokens; logit_bias bans tokens"
    ),
    "chat_template": Unsupported((), _OWN_TEMPLATE),
    "ec_transfer_params": Unsupported(),
    "guided_decoding_backend": Unsupported((), "is not supported: there is one backend"),
    "guided_whitespace_pattern": Unsupported(),
    "kv_transfer_params": Unsupported(),
    "length_penalty": Unsupported((1.0, 1), "is not supported: it is of beam search"),
    "logprob_token_ids": Unsupported((), "is not supported: use logprobs or top_logprobs"),
    "logits_processors": Unsupported(([],), "is not supported: a worker runs no code of callers"),
    "repetition_detection": Unsupported(),
    "return_mm_kwargs": Unsupported((True, False), _RENDERS),
    "return_token_offsets": Unsupported((False,), _RENDERS),
    "return_tokens_as_token_ids": Unsupported((False,), "is not supported: use return_token_ids"),
    "routed_experts_prompt_start": Unsupported((0,)),
    "session_id": Unsupported((), _SESSION),
    "spaces_between_special_tokens": Unsupported((True,)),
    "stream_interval": Unsupported((1,), "is not supported: events have the tokens that are there"),
    "structural_tag": Unsupported((), "is not supported: use tools or grammar"),
    "thinking_token_budget": Unsupported((-1,), "is not supported: use reasoning_effort"),
    "use_beam_search": Unsupported((False,)),
    "vllm_xargs": Unsupported(({},)),
    "watermarking": Unsupported((False,)),
}

#: Fields of vLLM's for vectors and scores.
_OF_POOLING: Mapping[str, Unsupported] = {
    **_OF_ANY,
    "add_special_tokens": Unsupported((True,), "is not supported: send token ids instead"),
    "cache_salt": Unsupported((), "is not supported: nothing of vectors is cached"),
    "padding": Unsupported(("do_not_pad",)),
    "priority": Unsupported((0,), "is not supported: use the header X-Quire-Priority"),
    "truncation_side": Unsupported(("right",), "is not supported: what is too long is cut behind"),
}
_TEXTS = "is not supported: send a text or token ids"

#: The same fields as a response has them; see quire/openai/responses.
UNSUPPORTED_IN_RESPONSES: Mapping[str, Unsupported] = {
    **_OF_ANY,
    "context_management": Unsupported(),
    "conversation": Unsupported((), "is not supported: use previous_response_id"),
    "enable_response_messages": Unsupported((False,)),
    "previous_input_messages": Unsupported((), "is not supported: use input"),
    "previous_response": Unsupported((), "is not supported: use previous_response_id"),
    "prompt": Unsupported((), "is not supported: use instructions and input"),
    # Quire's, but a response has no place for them.
    "prompt_logprobs": Unsupported(),
    "prompt_cache_retention": Unsupported(),
    "vllm_xargs": Unsupported(({},)),
}

#: All such fields by the kind of the request.
UNSUPPORTED: Mapping[str, Mapping[str, Unsupported]] = {
    "tokens": {},
    "completions": {
        **_OF_VLLM,
        "add_special_tokens": Unsupported((True,), "is not supported: send token ids instead"),
        "best_of": Unsupported((1,)),
        "echo": Unsupported((False,), "is of answers, not of requests"),
        "prompt_embeds": Unsupported(),
        "suffix": Unsupported(),
    },
    "chat.completions": {
        **_OF_VLLM,
        "add_special_tokens": Unsupported((False,), "is not supported: the template adds them"),
        "audio": Unsupported(),
        "best_of": Unsupported((1,), "is not supported: use n"),
        "echo": Unsupported((False,), "is not supported: the caller has the prompt"),
        "function_call": Unsupported(("none",), "is not supported: use tool_choice"),
        "functions": Unsupported(([],), "is not supported: use tools"),
        "media_io_kwargs": Unsupported(
            ({},), "is not supported: the model says how pictures are read"
        ),
        "metadata": Unsupported(({},), "is of calls: a request in the queue has its own"),
        "modalities": Unsupported((["text"],)),
        "moderation": Unsupported(),
        "prediction": Unsupported(),
        "prompt_cache_options": Unsupported(),
        "prompt_cache_retention": Unsupported(),
        "return_prompt_text": Unsupported((False,), "is not supported: use return_token_ids"),
        "store": Unsupported((False,), "is of calls: a request in the queue is always kept"),
        "verbosity": Unsupported(),
        "web_search_options": Unsupported(),
    },
    "embeddings": {
        **_OF_POOLING,
        "add_generation_prompt": Unsupported((False,), _TEXTS),
        "chat_template": Unsupported((), _TEXTS),
        "chat_template_kwargs": Unsupported(({},), _TEXTS),
        "continue_final_message": Unsupported((False,), _TEXTS),
        "embed_dtype": Unsupported(("float32",)),
        "endianness": Unsupported(("little", "native")),
        "media_io_kwargs": Unsupported(({},), _TEXTS),
        "messages": Unsupported((), _TEXTS),
        "normalize": Unsupported((True,), "is not supported: the model says whether it normalizes"),
        "use_activation": Unsupported((True,)),
    },
    "scores": _OF_POOLING,
}


def changes_nothing(fields: Mapping[str, Unsupported], name: str, value: object) -> bool:
    """Whether an unsupported field has a value without effect. A null means "the default".

    `fields` are the unsupported ones.
    """
    field = fields.get(name, Unsupported())
    # Types are compared because in Python 1 == True.
    return value is None or any(type(value) is type(one) and value == one for one in field.harmless)


def why_refused(fields: Mapping[str, Unsupported], name: str, *, known: Collection[str]) -> str:
    """The message for a field that is unknown or not supported.

    `fields` are the unsupported ones, and `known` the names that an unknown one may be meant to be.
    """
    field = fields.get(name)
    if field is None:
        return f"unknown field{nearest(name, known)}"
    instead = "".join(f", or set it to {json.dumps(value)}" for value in field.harmless)
    return f"{field.reason}: leave it out{instead}"


def told_prompt_of(body: Mapping[str, Any]) -> Literal["", "ids", "number"]:
    """What the log should tell of the prompt, besides log-probabilities."""
    if body.get("return_token_ids"):
        return "ids"
    options = body.get("stream_options")
    return "number" if isinstance(options, Mapping) and shows_usage_always(options) else ""


def shows_usage_always(options: Mapping[str, Any]) -> bool:
    """Whether each event of a stream with these `stream_options` has the usage so far."""
    return bool(options.get("include_usage") and options.get("continuous_usage_stats"))


def check_options(body: Mapping[str, Any]) -> None:
    """InvalidRequest for a wrong option that is no sampling parameter."""
    for name in ("include_reasoning", "return_token_ids"):
        if not isinstance(body.get(name), bool | None):
            raise InvalidRequest(f"body.{name}", "must be true or false")
    longest, salt = body.get("truncate_prompt_tokens"), body.get("cache_salt")
    if longest is not None and not (type(longest) is int and 0 < longest <= MAX_ARRAY_LENGTH):
        raise InvalidRequest("body.truncate_prompt_tokens", f"must be 1 to {MAX_ARRAY_LENGTH}")
    if body.get("truncation_side") not in (None, *TRUNCATION_SIDES):
        raise InvalidRequest("body.truncation_side", f"must be {' or '.join(TRUNCATION_SIDES)}")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LENGTH):
        raise InvalidRequest("body.cache_salt", f"must have 1 to {MAX_SALT_LENGTH} characters")
    tier = body.get("service_tier")
    if tier is not None and not (isinstance(tier, str) and tier in SERVICE_TIERS):
        known = ", ".join(SERVICE_TIERS)
        raise InvalidRequest("body.service_tier", f"must be one of {known}")
