"""The fields of a body beside the sampling parameters: those that it may have, and the others.

Knows OpenAI's API and vLLM's. Many programs send all fields that they know, so a field that is not
supported is ignored if its value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.chat_messages import TEMPLATE_FIELDS
from quire.wire.codec import MAX_ARRAY_LENGTH
from quire.wire.constraints import CONSTRAINT_FIELDS
from quire.wire.refusals import nearest

#: The longest `cache_salt`, in characters.
MAX_SALT_LENGTH = 256

#: OpenAI's tiers. The gateway makes priorities of them.
SERVICE_TIERS = ("auto", "default", "flex", "priority")

_OF_ALL = frozenset(
    {"model", "adapter", "stream", "stream_options", "user", "n", "max_completion_tokens"}
)
_OF_CALLS = _OF_ALL | {
    *CONSTRAINT_FIELDS,
    "truncate_prompt_tokens",
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


#: Fields of vLLM's for chats and completions.
_OF_VLLM: Mapping[str, Unsupported] = {
    "bad_words": Unsupported(
        ([],), "is not supported, as a word may be several tokens; logit_bias bans tokens"
    ),
    "chat_template": Unsupported((), "is not supported: only the model's own template is run"),
    "guided_decoding_backend": Unsupported((), "is not supported: there is one backend"),
    "guided_whitespace_pattern": Unsupported(),
    "kv_transfer_params": Unsupported(),
    "length_penalty": Unsupported((1.0, 1), "is not supported: it is of beam search"),
    "logits_processors": Unsupported(([],), "is not supported: a worker runs no code of callers"),
    "mm_processor_kwargs": Unsupported(({},), "is not supported: inputs are texts"),
    "priority": Unsupported(
        (0,), "is not supported: use service_tier or the header X-Quire-Priority"
    ),
    "request_id": Unsupported(
        (), "is not supported: the header Idempotency-Key makes a call repeatable"
    ),
    "return_tokens_as_token_ids": Unsupported((False,), "is not supported: use return_token_ids"),
    "spaces_between_special_tokens": Unsupported((True,)),
    "structural_tag": Unsupported((), "is not supported: use tools or grammar"),
    "use_beam_search": Unsupported((False,)),
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
        "metadata": Unsupported(({},)),
        "modalities": Unsupported((["text"],)),
        "moderation": Unsupported(),
        "prediction": Unsupported(),
        "prompt_cache_options": Unsupported(),
        "prompt_cache_retention": Unsupported(),
        "store": Unsupported((False,)),
        "thinking_token_budget": Unsupported(),
        "verbosity": Unsupported(),
        "web_search_options": Unsupported(),
    },
}


def changes_nothing(kind: str, name: str, value: object) -> bool:
    """Whether an unsupported field has a value without effect. A null means "the default"."""
    field = UNSUPPORTED[kind].get(name, Unsupported())
    # Types are compared because in Python 1 == True.
    return value is None or any(type(value) is type(one) and value == one for one in field.harmless)


def why_refused(kind: str, name: str, *, known: Collection[str]) -> str:
    """The message for a field that is unknown or not supported.

    `known` are the names that an unknown one may be meant to be.
    """
    field = UNSUPPORTED[kind].get(name)
    if field is None:
        return f"unknown field{nearest(name, known)}"
    instead = "".join(f", or set it to {json.dumps(value)}" for value in field.harmless)
    return f"{field.reason}: leave it out{instead}"


def check_options(body: Mapping[str, Any]) -> None:
    """InvalidRequest for a wrong option that is no sampling parameter."""
    for name in ("include_reasoning", "return_token_ids"):
        if not isinstance(body.get(name), bool | None):
            raise InvalidRequest(f"body.{name}", "must be true or false")
    longest, salt = body.get("truncate_prompt_tokens"), body.get("cache_salt")
    if longest is not None and not (type(longest) is int and 0 < longest <= MAX_ARRAY_LENGTH):
        raise InvalidRequest("body.truncate_prompt_tokens", f"must be 1 to {MAX_ARRAY_LENGTH}")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LENGTH):
        raise InvalidRequest("body.cache_salt", f"must have 1 to {MAX_SALT_LENGTH} characters")
    tier = body.get("service_tier")
    if tier is not None and not (isinstance(tier, str) and tier in SERVICE_TIERS):
        known = ", ".join(SERVICE_TIERS)
        raise InvalidRequest("body.service_tier", f"must be one of {known}")
