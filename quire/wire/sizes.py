"""Estimates the work of a request, in tokens, before it is tokenized.

The backlog of a queue can be limited by tokens. The estimate is fixed at submit and never corrected
later, so that the same number is added to the count and subtracted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.wire.pooling import is_pooled
from quire.wire.protocol import GenerationRequest

#: Bytes of UTF-8 that count as one token. With most vocabularies a token has fewer.
BYTES_PER_TOKEN = 4

#: Tokens for which a picture counts. Models make some hundreds to some thousands of one, and only a
#: worker knows how many.
TOKENS_PER_PICTURE = 512

#: Bytes of a picture that count as one token at the rate of a tenant, see `rate_tokens_of`.
PICTURE_BYTES_PER_TOKEN = 1024

#: The largest estimate for one request: so that the counts stay exact in Lua's numbers.
MAX_TOKENS_PER_REQUEST = 1 << 31

#: The answer for which a request without `max_tokens` counts if SUBMIT does not know better: if the
#: queue sets none, and no worker has announced its context.
ASSUMED_ANSWER = 256


def estimated_tokens(request: GenerationRequest) -> int:
    """Tokens of the prompt (exact if given as ids) plus the most tokens it may generate.

    Never raises: an invalid body is refused elsewhere, and gets some estimate here.
    """
    body = request.body
    field = "messages" if request.kind == "chat.completions" else "prompt"
    prompts = [body.get(field)]
    if is_pooled(request.kind):
        prompts = [body.get("input"), body.get("pair"), body.get("choice")]
    num_tokens = sum(map(_tokens_of, prompts)) + most_tokens_of_answer(request)
    return min(num_tokens, MAX_TOKENS_PER_REQUEST)


def rate_tokens_of(pictures: Iterable[bytes]) -> int:
    """Tokens for which bytes of pictures count at a tenant's rate, beside TOKENS_PER_PICTURE.

    They stay in Redis after the end of their request, so no end gives these tokens back: the rate
    bounds how many bytes a tenant leaves there.
    """
    return sum(-(-len(data) // PICTURE_BYTES_PER_TOKEN) for data in pictures)


def most_tokens_of_answer(request: GenerationRequest) -> int:
    """The most tokens it may generate, the part of `estimated_tokens` that it may leave unused.

    Never raises. 0 for a vector.
    """
    if is_pooled(request.kind):
        return 0
    max_tokens = _named_length(request)
    most = ASSUMED_ANSWER if max_tokens is None else max(1, max_tokens)
    return min(most, MAX_TOKENS_PER_REQUEST)


def is_open_ended(request: GenerationRequest) -> bool:
    """Whether it may generate as many tokens as its queue and the context allow. Never raises."""
    return not is_pooled(request.kind) and _named_length(request) is None


def _named_length(request: GenerationRequest) -> int | None:
    given = (request.body.get("max_tokens"), request.body.get("max_completion_tokens"))
    return next((value for value in given if type(value) is int), None)


def _tokens_of(prompt: object) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN)
    if not isinstance(prompt, list):
        return 0
    if prompt and isinstance(prompt[0], Mapping):
        return sum(_tokens_of_message(message) for message in prompt)
    return len(prompt)


def _tokens_of_message(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        maps = [part for part in content if isinstance(part, Mapping)]
        num_pictures = len([part for part in maps if part.get("type") == "image"])
        texts = [part.get("text") for part in maps]
        of_texts = sum(_tokens_of(text) for text in texts if isinstance(text, str))
        return of_texts + num_pictures * TOKENS_PER_PICTURE
    return _tokens_of(content) if isinstance(content, str) else 0
