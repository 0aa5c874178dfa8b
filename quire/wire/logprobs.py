"""How likely each token of an output was: the records, and how they stand among the ids of a log.

An array of tokens has the id of each. Where a request asked for log-probabilities, an array stands
in the place of the id: id, log-probability and text of the token, and then, three by three, the
same of the tokens that were the best at its place. So a token is never there without them, what
the scripts call ids stays bytes to them, and a log that has none is what it always was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ProtocolError
from quire.wire.codec import is_token_id, is_token_ids, pack_array, unpack

#: The most tokens named beside the one that came; OpenAI's limit, too.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a place: its natural log-probability, and its text."""

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token that came, and those that were the likeliest at its place, best first.

    The numbers are of the model itself: from its logits as they are, in single precision, before
    temperature, penalties, biases and whatever else had a part in the choice. So the token need not
    be among the `top`. A text is what the token says behind other text, by itself: bytes that are
    no whole character show as U+FFFD.
    """

    token_id: int
    logprob: float
    text: str
    top: tuple[TopLogprob, ...] = ()


def pack_tokens(logprobs: Sequence[TokenLogprob]) -> bytes:
    """Encodes tokens that have log-probabilities as one msgpack array."""
    return pack_array([_row(one) for one in logprobs])


def unpack_tokens(data: bytes) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
    """Decodes an array of tokens: the ids, and as many log-probabilities, or none.

    ProtocolError when it holds anything else, or tokens of both kinds.
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
