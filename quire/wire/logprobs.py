"""Log-probabilities of the tokens of an output and of its prompt: how a log encodes them.

The field `ids` of a log entry is an array with the id of each token. If the request has `logprobs`,
each item is an array instead: id, log-probability and text of the token, then the same three of
each of the likeliest tokens at this index. So a token is never published without its
log-probabilities, scripts still handle `ids` as plain bytes, and logs of other requests are the
same as before.

If a request asks for its prompt, the field of the first entry is a map: `tokens` is that array.
With `prompt_logprobs`, `prompt` has such an item for each token of the prompt; the log-probability
of the first is nil. With `return_token_ids` it is the array of the ids, and for a stream that
always shows its usage their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from quire.errors import InvalidRequest, ProtocolError
from quire.records import PromptToken, TokenLogprob, TopLogprob
from quire.wire.codec import MAX_TOKEN_ID, is_token_ids, pack_own, unpack

__all__ = [
    "MAX_PROMPT_IDS",
    "MAX_PROMPT_LOGPROBS",
    "MAX_TOP_LOGPROBS",
    "PromptToken",
    "TokenLogprob",
    "Tokens",
    "ToldPrompt",
    "TopLogprob",
    "check_prompt_logprobs",
    "pack_tokens",
    "unpack_tokens",
]

#: The most of the likeliest tokens that are given with each token; the same limit as OpenAI's.
MAX_TOP_LOGPROBS = 20

#: The character that decoding puts in place of invalid bytes.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: A byte from 0x80 on stands in the text of a token as the character with this number more, so
#: that readers of earlier versions find a text. No text of a real token has these characters.
_BYTES = 0x10FF00
_FIRST_BYTE = chr(_BYTES + 0x80)

#: The most ids of a prompt that a log has: they are in one entry, too, and take five bytes each.
MAX_PROMPT_IDS = 200_000

#: What a log tells of a prompt: its tokens with their log-probabilities, the ids of its tokens, or
#: how many there are; nothing if it is empty or 0.
ToldPrompt: TypeAlias = tuple[PromptToken, ...] | tuple[int, ...] | int

#: The most records that a log has of a prompt: its tokens, times 1 and `prompt_logprobs`. They are
#: in one entry, and readers accept no entry with more than 1 MiB of them.
MAX_PROMPT_LOGPROBS = 32_768


def check_prompt_logprobs(num_tokens: int, number: int | None) -> None:
    """InvalidRequest if a prompt of `num_tokens` is too long for `number` as `prompt_logprobs`."""
    most = 0 if number is None else num_tokens * (1 + number)
    if most > MAX_PROMPT_LOGPROBS:
        message = (
            f"needs {most} log-probabilities for a prompt of {num_tokens} tokens; at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed (tokens times one more than the alternatives)"
        )
        raise InvalidRequest("body.prompt_logprobs", message)


class Tokens(NamedTuple):
    """What the field `ids` of an entry holds; `logprobs` has one record for each id, or none."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt: ToldPrompt


def pack_tokens(tokens: Sequence[TokenLogprob] | Sequence[int], prompt: ToldPrompt = ()) -> bytes:
    """Encodes tokens, as ids or with their log-probabilities, and what is told of the prompt."""
    rows = _rows(tokens)
    told = prompt if isinstance(prompt, int) else _rows(prompt)
    return pack_own({"prompt": told, "tokens": rows} if prompt else rows)


def unpack_tokens(data: bytes) -> Tokens:
    """Decodes what `pack_tokens` made, or plain ids.

    ProtocolError when it holds anything else, or if only some of the tokens have log-probabilities.
    """
    value = unpack(data)
    prompt: ToldPrompt = ()
    if isinstance(value, dict) and value.keys() == {"prompt", "tokens"}:
        prompt, value = _prompt_of(value["prompt"]), value["tokens"]
    if is_token_ids(value):
        return Tokens(tuple(value), (), prompt)
    if not isinstance(value, list) or not _are_rows(value):
        raise ProtocolError("message is not an array of tokens")
    logprobs = tuple(TokenLogprob(*_parts_of(row)) for row in value)
    return Tokens(tuple(one.token_id for one in logprobs), logprobs, prompt)


def _prompt_of(value: Any) -> ToldPrompt:
    if type(value) is int and 0 < value <= MAX_TOKEN_ID:
        return value
    if value and is_token_ids(value):
        return tuple(value)
    match value:
        case [[token_id, None, text], *rest] if _are_rows([[token_id, 0.0, text], *rest]):
            others = (PromptToken(*_parts_of(row)) for row in rest)
            first, raw = _read(text)
            return (PromptToken(token_id, None, first, raw=raw), *others)
    raise ProtocolError("message is not an array of the tokens of a prompt")


def _rows(tokens: Sequence[TokenLogprob | PromptToken] | Sequence[int]) -> list[object]:
    return [one if isinstance(one, int) else _row(one) for one in tokens]


def _row(one: TokenLogprob | PromptToken) -> list[object]:
    row: list[object] = [one.token_id, one.logprob, _written(one)]
    for top in one.top:
        row += top.token_id, top.logprob, _written(top)
    return row


def _written(one: TokenLogprob | PromptToken | TopLogprob) -> str:
    """The text on the wire: if it does not say all bytes of the token, the bytes themselves."""
    raw = one.raw or (one.text.encode() if one.text and max(one.text) >= _FIRST_BYTE else b"")
    return "".join(chr(byte if byte < 0x80 else _BYTES + byte) for byte in raw) or one.text


def _read(text: str) -> tuple[str, bytes]:
    """The text and the bytes of what `_written` made."""
    if text.isascii() or max(text) < _FIRST_BYTE:
        return text, b""
    codes = map(ord, text)
    raw = b"".join(
        bytes([code - _BYTES]) if code >= ord(_FIRST_BYTE) else chr(code).encode() for code in codes
    )
    shown = raw.decode(errors="replace")
    return shown, raw if REPLACEMENT in shown else b""


def _are_rows(rows: Sequence[Any]) -> bool:
    # All at once and not row by row: there may be tens of thousands.
    if not all(
        isinstance(row, list) and 0 < len(row) <= 3 * (1 + MAX_TOP_LOGPROBS) and len(row) % 3 == 0
        for row in rows
    ):
        return False
    logprobs = list(chain.from_iterable(row[1::3] for row in rows))
    texts = chain.from_iterable(row[2::3] for row in rows)
    return (
        is_token_ids(list(chain.from_iterable(row[::3] for row in rows)))
        and set(map(type, logprobs)) <= {float}
        and not any(map(math.isnan, logprobs))
        and set(map(type, texts)) <= {str}
    )


def logprobs_of_chat(body: Mapping[str, Any]) -> Any:
    """The parameter `logprobs` of a chat. OpenAI's chats split it: a switch, and `top_logprobs`."""
    switch, top = body.get("logprobs"), body.get("top_logprobs")
    if top is None:
        return 0 if switch is True else None if switch is False else switch
    if switch is not True:
        raise InvalidRequest("body.top_logprobs", "needs logprobs to be true")
    if type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("body.top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
    return top


def _parts_of(row: Sequence[Any]) -> tuple[int, float, str, tuple[TopLogprob, ...], bytes]:
    token_id, logprob, (text, raw) = row[0], row[1], _read(row[2])
    if len(row) == 3:
        return token_id, logprob, text, (), raw
    tops = zip(row[3::3], row[4::3], row[5::3], strict=True)
    return token_id, logprob, text, tuple(TopLogprob(*top[:2], *_read(top[2])) for top in tops), raw
