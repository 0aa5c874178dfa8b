"""Log-probabilities in the two shapes of OpenAI's responses, of chats and of completions.

Both are columns: lists with a value for each token. So they can be written in parts, by those who
have others to serve meanwhile: one answer may hold many megabytes of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from quire.wire.logprobs import TokenLogprob, TopLogprob

#: Stands for everything below it: JSON has no infinity, and OpenAI's numbers end here.
LEAST_LOGPROB = -9999.0

#: What decoding makes of bytes that are no character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


#: Tokens that are written in one part: some two milliseconds, with the most that stands by each.
TOKENS_PER_PART = 16

#: JSON in the fewest characters.
compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a chat."""
    return {"refusal": None} | _filled(_columns_of_chat(logprobs))


def of_completion(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a completion.

    Its maps name tokens by their text. The token that came is always among them; of several with
    one text the likeliest stays.
    """
    return _filled(_columns_of_completion(logprobs))


def written(logprobs: Sequence[TokenLogprob], *, is_chat: bool) -> Iterator[str]:
    """One of these fields as JSON, in parts, each of which is made as it is asked for."""
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
    # Of bytes that are no whole character the text does not tell which they are.
    known = None if REPLACEMENT in one.text else list(one.text.encode())
    return {"token": one.text, "logprob": _number(one), "bytes": known}


def _by_text(one: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(top.text, _number(top))
    found.setdefault(one.text, _number(one))
    return found


def _number(one: TokenLogprob | TopLogprob) -> float:
    return max(one.logprob, LEAST_LOGPROB)
