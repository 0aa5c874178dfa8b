"""Log-probabilities of the tokens of an output and of its prompt: how a log encodes them.

The field `ids` of a log entry is an array with the id of each token. If the request has `logprobs`,
each item is an array instead: id, log-probability and text of the token, then the same three of
each of the likeliest tokens at this index. So a token is never published without its
log-probabilities, scripts still handle `ids` as plain bytes, and logs of other requests are the
same as before.

If the request has `prompt_logprobs`, the field of the first entry is a map: `tokens` is that array,
and `prompt` has such an item for each token of the prompt; the log-probability of the first is nil.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.errors import ProtocolError
from quire.records import PromptToken, TokenLogprob, TopLogprob
from quire.wire.codec import is_token_id, is_token_ids, pack_own, unpack

__all__ = [
    "MAX_PROMPT_LOGPROBS",
    "MAX_TOP_LOGPROBS",
    "PromptToken",
    "TokenLogprob",
    "Tokens",
    "TopLogprob",
    "pack_tokens",
    "unpack_tokens",
]

#: The most of the likeliest tokens that are given with each token; the same limit as OpenAI's.
MAX_TOP_LOGPROBS = 20

#: The most records that a log has of a prompt: its tokens, times 1 and `prompt_logprobs`. They are
#: in one entry, and readers accept no entry with more than 1 MiB of them.
MAX_PROMPT_LOGPROBS = 32_768


class Tokens(NamedTuple):
    """What the field `ids` of an entry holds; `logprobs` has one record for each id, or none."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt: tuple[PromptToken, ...]


def pack_tokens(
    tokens: Sequence[TokenLogprob] | Sequence[int], prompt: Sequence[PromptToken] = ()
) -> bytes:
    """Encodes tokens, as ids or with their log-probabilities, and those of the prompt, if any."""
    rows = [one if isinstance(one, int) else _row(one) for one in tokens]
    return pack_own({"prompt": [_row(one) for one in prompt], "tokens": rows} if prompt else rows)


def unpack_tokens(data: bytes) -> Tokens:
    """Decodes what `pack_tokens` made, or plain ids.

    ProtocolError when it holds anything else, or if only some of the tokens have log-probabilities.
    """
    value, prompt = unpack(data), tuple[PromptToken, ...]()
    if isinstance(value, dict) and value.keys() == {"prompt", "tokens"}:
        prompt, value = _prompt_of(value["prompt"]), value["tokens"]
    if is_token_ids(value):
        return Tokens(tuple(value), (), prompt)
    if not isinstance(value, list) or not all(map(_is_row, value)):
        raise ProtocolError("message is not an array of tokens")
    logprobs = tuple(TokenLogprob(*_parts_of(row)) for row in value)
    return Tokens(tuple(one.token_id for one in logprobs), logprobs, prompt)


def _prompt_of(value: Any) -> tuple[PromptToken, ...]:
    match value:
        case [[token_id, None, text], *rest] if all(map(_is_row, [[token_id, 0.0, text], *rest])):
            others = (PromptToken(*_parts_of(row)) for row in rest)
            return (PromptToken(token_id, None, text), *others)
    raise ProtocolError("message is not an array of the tokens of a prompt")


def _row(one: TokenLogprob | PromptToken) -> list[object]:
    row: list[object] = [one.token_id, one.logprob, one.text]
    for top in one.top:
        row += top.token_id, top.logprob, top.text
    return row


def _is_row(value: object) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= 3 * (1 + MAX_TOP_LOGPROBS)
        and len(value) % 3 == 0
        and all(map(is_token_id, value[::3]))
        and all(type(logprob) is float and not math.isnan(logprob) for logprob in value[1::3])
        and all(isinstance(text, str) for text in value[2::3])
    )


def _parts_of(row: Sequence[Any]) -> tuple[int, float, str, tuple[TopLogprob, ...]]:
    tops = zip(row[3::3], row[4::3], row[5::3], strict=True)
    token_id, logprob, text = row[:3]
    return token_id, logprob, text, tuple(TopLogprob(*top) for top in tops)
