"""Log-probabilities in the two formats of OpenAI's API, and those of a prompt in vLLM's.

All are lists with one value per token. One answer may hold many megabytes of them, so they are made
as iterators, and `written` encodes them in parts: a gateway can serve other requests between two.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any

from quire.wire.logprobs import REPLACEMENT, PromptToken, TokenLogprob, TopLogprob

#: Replaces all lower values: JSON has no infinity, and this is the lowest value of OpenAI's API.
MIN_LOGPROB = -9999.0

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


def columns_of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The same as `of_chat`, with an iterator in the place of each list."""
    content = (_entry(one) | {"top_logprobs": [*map(_entry, one.top)]} for one in logprobs)
    return {"refusal": None, "content": content}


def columns_of_completion(
    tokens: Sequence[TokenLogprob | PromptToken],
    *,
    echoed: str | None = None,
    ends: Sequence[int] = (),
) -> dict[str, Any]:
    """The field `logprobs` of a choice of a completion, with the tokens of an echoed prompt first.

    An iterator is in the place of each list. Its maps use the text of a token as the key. The
    sampled token is always included. If several tokens have the same text, the likeliest is kept; a
    part of a character is shown by its bytes. The first token of a prompt has nulls. `echoed` is
    the text of that prompt, if it is not that of its tokens. `ends` are the lengths of the text
    after each token of the output, if known.
    """
    before = texts_of([one for one in tokens if isinstance(one, PromptToken)])
    after = [one for one in tokens if not isinstance(one, PromptToken)]
    length = len(echoed) if echoed is not None else sum(map(len, before))
    ends = ends if len(ends) == len(after) else [*accumulate(map(len, texts_of(after)))]
    offsets = chain(
        _starts(before) if echoed is None else _places(echoed, before),
        (length + end for end in chain([0], ends)),
    )
    return {
        "tokens": map(_key, tokens),
        "token_logprobs": map(_number, tokens),
        "top_logprobs": map(_by_text, tokens),
        "text_offset": islice(offsets, len(tokens)),
    }


def texts_of(tokens: Sequence[TokenLogprob | PromptToken]) -> list[str]:
    """What each token adds to the text: the last part of a character adds the character."""
    decode = getincrementaldecoder("utf-8")("replace").decode
    texts = [decode(one.raw or one.text.encode()) for one in tokens]
    if texts:
        texts[-1] += decode(b"", final=True)
    return texts


def _starts(texts: Sequence[str]) -> Iterator[int]:
    """Where each text begins in all of them together."""
    return islice(accumulate(map(len, texts), initial=0), len(texts))


def _places(prompt: str, texts: Sequence[str]) -> Iterator[int]:
    """Where the text of each token begins in the prompt.

    A token that is not in the text of the prompt, such as one for its beginning or a part of a
    character, begins where the next one does, or the last one that is.
    """
    place = skipped = 0
    for text in texts:
        found = prompt.find(text, place, place + skipped + len(text))
        if found < 0:
            yield place
            skipped = min(skipped + len(text), MAX_SKIPPED)
        else:
            yield found
            if text:
                place, skipped = found + len(text), 0


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
    # A worker of an earlier version does not tell the bytes of a replacement character.
    is_known = one.raw or REPLACEMENT not in one.text
    original = list(one.raw or one.text.encode()) if is_known else None
    return {"token": one.text, "logprob": _number(one), "bytes": original}


def _key(one: TokenLogprob | PromptToken | TopLogprob) -> str:
    """The text of a token as completions show it: of a part of a character, its bytes."""
    if not one.raw:
        return one.text
    shown = (
        chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"
        for byte in one.raw
    )
    return "bytes:" + "".join(shown)


def _by_text(one: TokenLogprob | PromptToken) -> dict[str, float] | None:
    own = _number(one)
    if own is None:
        return None
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(_key(top), max(top.logprob, MIN_LOGPROB))
    found.setdefault(_key(one), own)
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
