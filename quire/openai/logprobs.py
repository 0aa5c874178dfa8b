"""Log-probabilities in the two formats of OpenAI's API, and those of a prompt in vLLM's.

All are lists with one value per token. One answer may hold many megabytes of them, so they are made
as iterators, and `written` encodes them in parts: a gateway can serve other requests between two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from quire.wire.logprobs import PromptToken, TokenLogprob, TopLogprob

#: Replaces all lower values: JSON has no infinity, and this is the lowest value of OpenAI's API.
MIN_LOGPROB = -9999.0

#: The character that decoding puts in place of invalid bytes.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: Tokens in one part: about two milliseconds of work with the largest `logprobs`.
TOKENS_PER_PART = 16

#: How far behind its expected place a token is searched in the text of an echoed prompt.
MAX_SKIPPED = 64

#: Encodes JSON without optional white space.
compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

#: The same in ASCII, for events: many clients take some other characters for ends of lines.
compact_ascii = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a chat."""
    return filled(columns_of_chat(logprobs))  # type: ignore[no-any-return]


def of_completion(
    tokens: Sequence[TokenLogprob | PromptToken], *, echoed: str | None = None
) -> dict[str, Any]:
    """The field `logprobs` of a choice of a completion, with the tokens of an echoed prompt first.

    Its maps use the text of a token as the key. The sampled token is always included. If several
    tokens have the same text, the likeliest is kept. The first token of a prompt has nulls.
    `echoed` is the text of that prompt, if it is not that of its tokens one by one.
    """
    columns = columns_of_completion(tokens, echoed=echoed)
    return filled(columns)  # type: ignore[no-any-return]


def columns_of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The same as `of_chat`, with an iterator in the place of each list."""
    content = (_entry(one) | {"top_logprobs": [*map(_entry, one.top)]} for one in logprobs)
    return {"refusal": None, "content": content}


def columns_of_completion(
    tokens: Sequence[TokenLogprob | PromptToken], *, echoed: str | None = None
) -> dict[str, Any]:
    """The same as `of_completion`, with an iterator in the place of each list."""
    if echoed is None:
        offsets: Iterator[int] = accumulate((len(one.text) for one in tokens), initial=0)
    else:
        offsets = _offsets_after(echoed, tokens)
    return {
        "tokens": (one.text for one in tokens),
        "token_logprobs": map(_number, tokens),
        "top_logprobs": map(_by_text, tokens),
        "text_offset": islice(offsets, len(tokens)),
    }


def _offsets_after(prompt: str, tokens: Sequence[TokenLogprob | PromptToken]) -> Iterator[int]:
    """Where the text of each token begins, first in the prompt, then behind it.

    A token that is not in the text of the prompt, such as one for its beginning or a part of a
    character, begins where the next one does, or the last one that is.
    """
    place = skipped = 0
    output = len(prompt)
    for one in tokens:
        if not isinstance(one, PromptToken):
            yield output
            output += len(one.text)
            continue
        found = prompt.find(one.text, place, place + skipped + len(one.text))
        if found < 0:
            yield place
            skipped = min(skipped + len(one.text), MAX_SKIPPED)
        else:
            yield found
            place, skipped = found + len(one.text), 0


def columns_of_prompt(tokens: Sequence[PromptToken]) -> Iterator[dict[str, Any] | None]:
    """The field `prompt_logprobs`: null for the first token, a map by token id for each other."""
    return map(_by_token_id, tokens)


def filled(value: Any) -> Any:
    """A part of an answer with a list in the place of each iterator."""
    if isinstance(value, Iterator):
        return list(value)
    if isinstance(value, dict):
        return {name: filled(one) for name, one in value.items()}
    return [*map(filled, value)] if _has_maps(value) else value


def written(value: Any, *, encode: Callable[[Any], str] = compact) -> Iterator[str]:
    """Yields a part of an answer as JSON text. What iterators give is encoded some at a time."""
    if isinstance(value, Iterator):
        comma = "["
        while part := list(islice(value, TOKENS_PER_PART)):
            yield comma + encode(part)[1:-1]
            comma = ","
        yield "]" if comma == "," else "[]"
    elif isinstance(value, dict) and value:
        comma = "{"
        for name, one in value.items():
            yield f"{comma}{encode(name)}:"
            yield from written(one, encode=encode)
            comma = ","
        yield "}"
    elif _has_maps(value):
        comma = "["
        for one in value:
            yield comma
            yield from written(one, encode=encode)
            comma = ","
        yield "]"
    else:
        yield encode(value)


def _has_maps(value: object) -> bool:
    """Whether it is a list of choices. The many other lists of an answer have no iterators."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _entry(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
    # With a replacement character in the text, the original bytes are not known.
    original = None if REPLACEMENT in one.text else list(one.text.encode())
    return {"token": one.text, "logprob": _number(one), "bytes": original}


def _by_text(one: TokenLogprob | PromptToken) -> dict[str, float] | None:
    own = _number(one)
    if own is None:
        return None
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(top.text, max(top.logprob, MIN_LOGPROB))
    found.setdefault(one.text, own)
    return found


def _by_token_id(one: PromptToken) -> dict[str, Any] | None:
    if one.logprob is None:
        return None
    # A token that is not among the likeliest has no known rank.
    found = {str(one.token_id): _ranked(one.logprob, None, one.text)}
    for rank, top in enumerate(one.top, start=1):
        found[str(top.token_id)] = _ranked(top.logprob, rank, top.text)
    return found


def _ranked(logprob: float, rank: int | None, text: str) -> dict[str, Any]:
    return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}


def _number(one: TokenLogprob | TopLogprob | PromptToken) -> float | None:
    return None if one.logprob is None else max(one.logprob, MIN_LOGPROB)
