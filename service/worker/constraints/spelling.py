"""Tokenizes the text that a constraint forces, as the tokenizer itself would.

Knows no request. The library can force text by itself, with two faults. If the text equals that of
a control token, such as `<s>`, it chooses the control token, which no text may contain. And for a
grammar that never ends it forces text until it reaches a limit. So forcing is switched off in the
library and done here.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.constraint import TokenBitmask, allows

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: How far to look ahead for forced text, in bytes: enough to see the end of most words.
MAX_FORCED_BYTES = 32
#: How far to look ahead for drafts, in bytes.
MAX_DRAFTED_BYTES = 2 * MAX_FORCED_BYTES
#: Added to the list of grammars, it makes the library force nothing. No other grammar refers to it.
_FORCES_NOTHING = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}


class Speller:
    """Tokenizes forced text with ordinary tokens only, even if it looks like a control token.

    Every result is a function of the tokens that the matcher has consumed. If the library reaches a
    limit while looking ahead, the matcher that is returned has the error.

    Args:
        ends: the tokens that are an end of sequence, even if the tokenizer has them as text.
    """

    def __init__(self, tokenizer: "LLTokenizer", *, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._texts: list[bytes] = [
            b"" if id_ in ends or tokenizer.is_special_token(id_) else tokenizer.decode_bytes([id_])
            for id_ in range(tokenizer.vocab_size)
        ]
        first = np.array([text[0] if text else -1 for text in self._texts], dtype=np.int16)
        padded = np.full(-(-len(first) // 32) * 32, -1, dtype=np.int16)
        padded[: len(first)] = first
        #: For each byte, the bits of the tokens that do not begin with it.
        self._others = [np.packbits(padded != byte, bitorder="little") for byte in range(256)]
        self._of_one_byte = {text: id_ for id_, text in enumerate(self._texts) if len(text) == 1}

    def begins_with(self, marks: bytes) -> NDArray[np.bool_]:
        """For each bit of a mask, whether the text of its token begins with one of `marks`."""
        found = np.ones(8 * len(self._others[0]), dtype=np.bool_)
        for mark in marks:
            found &= np.unpackbits(self._others[mark], bitorder="little").astype(np.bool_)
        return ~found

    def keep_to_spelling(self, bits: TokenBitmask, matcher: "LLMatcher") -> "LLMatcher":
        """Leave only one token in `bits`, in place, if all tokens begin the same forced text.

        The one left is the tokenizer's own: the model has learned from text that is spelled so.
        Otherwise `bits` stay unchanged, and the model chooses. Returns the matcher that looked
        ahead, which has the error if that reached a limit of the library, or the given one.
        """
        # Of tokens that begin the same text, each ends at another byte: there is one per byte.
        if not 1 < int.from_bytes(bits.tobytes()).bit_count() <= MAX_FORCED_BYTES:
            return matcher
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        longest = max((self._texts[token_id] for token_id in ids), key=len)
        if not all(self._begins(longest, token_id) for token_id in ids):
            return matcher
        text, ahead = self._forced_text(matcher, bits, most=MAX_FORCED_BYTES)
        first = self._tokenize(text)
        if first and allows(bits, first[0]) and text.startswith(longest):
            bits[:] = 0
            bits[first[0] // 8] = 1 << first[0] % 8
        return ahead

    def draft(self, matcher: "LLMatcher") -> list[int]:
        """Tokens of forced text; each one is the token that `keep_to_spelling` would leave.

        The last token is left out: if the text after it is not forced, a longer token may be
        possible, and then the model chooses.
        """
        bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), dtype=np.uint8)
        if matcher.is_accepting():
            return []
        text, _ = self._forced_text(matcher, bits, most=MAX_DRAFTED_BYTES)
        found = list(self._tokens_one_by_one(text))[:-1]
        return found[: matcher.deep_copy().validate_tokens(found)]

    def _forced_text(
        self, matcher: "LLMatcher", bits: TokenBitmask, *, most: int
    ) -> tuple[bytes, "LLMatcher"]:
        """The only text that can come, up to `most` bytes, and the matcher that looked ahead."""
        ahead, text = matcher.deep_copy(), b""
        while len(text) < most:
            ids = np.flatnonzero(bits)[:1]
            if not len(ids):
                break
            token_id = int(ids[0]) * 8 + (int(bits[ids[0]]) & -int(bits[ids[0]])).bit_length() - 1
            byte = self._texts[token_id][:1]
            if not byte or np.any(bits & self._others[byte[0]][: len(bits)]):
                break
            text += byte
            if byte not in self._of_one_byte or not ahead.consume_token(self._of_one_byte[byte]):
                break
            if ahead.is_stopped() or ahead.is_accepting():
                break
            bits = np.frombuffer(ahead.compute_bitmask(), dtype=np.uint8)
        return text, ahead

    def _tokenize(self, text: bytes) -> Sequence[int]:
        """The tokens of a text, up to the first control token."""
        token_ids: Sequence[int] = self._tokenizer.tokenize_bytes(text)
        return list(takewhile(lambda token_id: self._texts[token_id], token_ids))

    def _tokens_one_by_one(self, text: bytes) -> Iterator[int]:
        """Tokens that are each the first token of the remaining text, within MAX_FORCED_BYTES.

        Stops where a text that was cut has fewer bytes left: its next token is not certain.
        """
        is_cut = len(text) == MAX_DRAFTED_BYTES
        while text and not (is_cut and len(text) < MAX_FORCED_BYTES):
            first = self._tokenize(text[:MAX_FORCED_BYTES])[:1]
            if not first:
                break
            yield first[0]
            text = text[len(self._texts[first[0]]) :]

    def _begins(self, text: bytes, token_id: int) -> bool:
        return bool(self._texts[token_id]) and text.startswith(self._texts[token_id])


def without_forcing(grammar: str) -> str:
    """The same grammar (JSON of the library) with forcing switched off, for use with a Speller."""
    described: dict[str, Any] = json.loads(grammar)
    described["grammars"].append(_FORCES_NOTHING)
    return json.dumps(described)
