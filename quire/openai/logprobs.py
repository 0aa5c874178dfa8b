"""Log-probabilities in the two formats of OpenAI's API, for chats and for completions.

Both consist of columns: lists with one value per token. One answer may hold many megabytes of them,
so `written` encodes them in parts: a gateway can serve other requests between two parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from quire.wire.logprobs import TokenLogprob, TopLogprob

#: Replaces all lower values: JSON has no infinity, and this is the lowest value of OpenAI's API.
MIN_LOGPROB = -9999.0

#: The character that decoding puts in place of invalid bytes.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: Tokens in one part: about two milliseconds of work with the largest `logprobs`.
TOKENS_PER_PART = 16

#: Encodes JSON without optional white space.
compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a chat."""
    return {"refusal": None} | _filled(_columns_of_chat(logprobs))


def of_completion(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a completion.

    Its maps use the text of a token as the key. The sampled token is always included. If several
    tokens have the same text, the likeliest is kept.
    """
    return _filled(_columns_of_completion(logprobs))


def written(logprobs: Sequence[TokenLogprob], *, is_chat: bool) -> Iterator[str]:
    """Yields one of these fields as JSON text, in parts that are encoded one at a time."""
    columns = (_columns_of_chat if is_chat else _columns_of_completion)(logprobs)
    begin = '{"refusal":null,' if is_chat else "{"
    for name, values in columns.items():
        yield f'{begin}"{name}":['
        begin = ","
        comma = ""
        while part := list(islice(values, TOKENS_PER_PART)):
            yield comma + compact(part)[1:-1]
            comma = ","
        yield "]"
    yield "}"


def _filled(columns: dict[str, Iterator[Any]]) -> dict[str, Any]:
    return {name: list(values) for name, values in columns.items()}


def _columns_of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Iterator[Any]]:
    content = (_entry(one) | {"top_logprobs": [*map(_entry, one.top)]} for one in logprobs)
    return {"content": content}


def _columns_of_completion(logprobs: Sequence[TokenLogprob]) -> dict[str, Iterator[Any]]:
    offsets = accumulate((len(one.text) for one in logprobs), initial=0)
    return {
        "tokens": (one.text for one in logprobs),
        "token_logprobs": map(_number, logprobs),
        "top_logprobs": map(_by_text, logprobs),
        "text_offset": islice(offsets, len(logprobs)),
    }


def _entry(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
    # With a replacement character in the text, the original bytes are not known.
    original = None if REPLACEMENT in one.text else list(one.text.encode())
    return {"token": one.text, "logprob": _number(one), "bytes": original}


def _by_text(one: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(top.text, _number(top))
    found.setdefault(one.text, _number(one))
    return found


def _number(one: TokenLogprob | TopLogprob) -> float:
    return max(one.logprob, MIN_LOGPROB)
