"""Bodies of OpenAI's responses with vectors: `/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from quire.openai.logprobs import compact
from quire.wire.output import Completion

#: How a vector is written: as numbers, or as the base64 text of its float32, little-endian.
VectorEncoding = Literal["float", "base64"]


def encoding_of(name: object) -> VectorEncoding:
    """The encoding that a field names; numbers for everything but base64."""
    return "base64" if name == "base64" else "float"


def embeddings_response(
    model: str, completions: Sequence[Completion], *, encoding: VectorEncoding
) -> dict[str, Any]:
    """The body of a response with the vectors of all inputs, in their order."""
    data = [_entry(index, one, encoding) for index, one in enumerate(completions)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(completions)}


def written_embeddings(
    model: str, completions: Sequence[Completion], *, encoding: VectorEncoding
) -> Iterator[str]:
    """Yields the same body as JSON text, one vector at a time."""
    yield '{"object":"list","data":['
    for index, completion in enumerate(completions):
        yield compact(_entry(index, completion, encoding))
        yield "," if index < len(completions) - 1 else ""
    yield f'],"model":{compact(model)},"usage":{compact(_usage(completions))}}}'


def _entry(index: int, completion: Completion, encoding: VectorEncoding) -> dict[str, Any]:
    vector: Any = completion.embedding
    if encoding == "base64":
        vector = base64.b64encode(completion.vector).decode()
    return {"object": "embedding", "index": index, "embedding": vector}


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    prompt_tokens = sum(one.usage.prompt_tokens for one in completions)
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
