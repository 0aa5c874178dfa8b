"""Log-probabilities in the two shapes of OpenAI's responses, of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.logprobs import TokenLogprob, TopLogprob

#: Stands for everything below it: JSON has no infinity, and OpenAI's numbers end here.
LEAST_LOGPROB = -9999.0

#: What decoding makes of bytes that are no character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def of_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a chat."""
    content = [_entry(one) | {"top_logprobs": [_entry(top) for top in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}


def of_completion(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a completion.

    Its maps name tokens by their text. The token that came is always among them; of several with
    one text the likeliest stays.
    """
    offsets, end = [], 0
    for one in logprobs:
        offsets.append(end)
        end += len(one.text)
    return {
        "tokens": [one.text for one in logprobs],
        "token_logprobs": [_number(one) for one in logprobs],
        "top_logprobs": [_by_text(one) for one in logprobs],
        "text_offset": offsets,
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
