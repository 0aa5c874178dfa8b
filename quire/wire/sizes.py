"""How much work a request is, in tokens, before any tokenizer has seen it.

The backlog of a queue can be limited by tokens. What a request counts for is fixed when it is
submitted and never corrected later, so that what is added to the count is what is taken off again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import SamplingParams

#: A text counts as one token for so many bytes of UTF-8; few vocabularies are coarser.
BYTES_PER_TOKEN = 4

#: The most a request can count for: the counts stay exact in the numbers of Lua.
MAX_TOKENS_PER_REQUEST = 1 << 31

_DEFAULT_MAX_TOKENS: int = SamplingParams.model_fields["max_tokens"].default


def estimated_tokens(request: GenerationRequest) -> int:
    """The tokens of the prompt, exact where it is given as ids, and the most it may generate.

    Never raises: a body that makes no sense is refused elsewhere, and counts for something here.
    """
    body = request.body
    prompt = body.get("messages") if request.kind == "chat.completions" else body.get("prompt")
    asked = [body.get("max_tokens"), body.get("max_completion_tokens")]
    most = next((value for value in asked if type(value) is int), _DEFAULT_MAX_TOKENS)
    return min(_tokens_of(prompt) + max(1, most), MAX_TOKENS_PER_REQUEST)


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
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return sum(_tokens_of(part) for part in parts if isinstance(part, str))
    return _tokens_of(content) if isinstance(content, str) else 0
