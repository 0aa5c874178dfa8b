"""Log-probabilities of the tokens of an output: how a log encodes them.

The field `ids` of a log entry is an array with the id of each token. If the request has `logprobs`,
each item is an array instead: id, log-probability and text of the token, then the same three of
each of the likeliest tokens at this index. So a token is never published without its
log-probabilities, scripts still handle `ids` as plain bytes, and logs of other requests are the
same as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.errors import ProtocolError
from quire.records import TokenLogprob, TopLogprob
from quire.wire.codec import is_token_id, is_token_ids, pack_array, unpack

__all__ = ["MAX_TOP_LOGPROBS", "TokenLogprob", "TopLogprob", "pack_tokens", "unpack_tokens"]

#: The most of the likeliest tokens that are given with each token; the same limit as OpenAI's.
MAX_TOP_LOGPROBS = 20


def pack_tokens(logprobs: Sequence[TokenLogprob]) -> bytes:
    """Encodes tokens with their log-probabilities as one msgpack array."""
    return pack_array([_row(one) for one in logprobs])


def unpack_tokens(data: bytes) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
    """Decodes an array of tokens: the ids, and one log-probability record for each, or none.

    ProtocolError when it holds anything else, or if only some of the tokens have them.
    """
    value = unpack(data)
    if is_token_ids(value):
        return tuple(value), ()
    if not isinstance(value, list) or not all(map(_is_row, value)):
        raise ProtocolError("message is not an array of tokens")
    logprobs = tuple(map(_logprob_of, value))
    return tuple(one.token_id for one in logprobs), logprobs


def _row(one: TokenLogprob) -> list[object]:
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


def _logprob_of(row: Sequence[Any]) -> TokenLogprob:
    tops = zip(row[3::3], row[4::3], row[5::3], strict=True)
    token_id, logprob, text = row[:3]
    return TokenLogprob(token_id, logprob, text, tuple(TopLogprob(*top) for top in tops))
