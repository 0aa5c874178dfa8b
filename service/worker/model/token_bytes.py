"""The bytes of a token whose text alone is no complete character. Knows no request.

Tokenizers write bytes in two ways: byte-level ones have a visible character for each, and those
with a fallback have a token `<0x..>` for each. What neither explains stays unknown.
"""

import re
from functools import cache

from tokenizers import Tokenizer

from quire.wire.logprobs import REPLACEMENT

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
#: The bytes whose visible character is the one of the same number; the others follow from 256 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def bytes_of(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """The bytes of the token if its `text` has U+FFFD, else none; none also if they are unknown."""
    token = tokenizer.id_to_token(token_id) if REPLACEMENT in text else None
    if token is None:
        return b""
    if found := _FALLBACK.fullmatch(token):
        return bytes.fromhex(found[1])
    numbers = [_byte_of_character().get(one) for one in token]
    raw = bytes(one for one in numbers if one is not None)
    # The check tells a byte-level token from one that only looks like it.
    is_whole = len(raw) == len(token) and raw.decode(errors="replace") == text
    return raw if is_whole else b""


@cache
def _byte_of_character() -> dict[str, int]:
    hidden = (byte for byte in range(0x100) if byte not in _VISIBLE)
    shown = {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
    return shown | {chr(byte): byte for byte in _VISIBLE}
