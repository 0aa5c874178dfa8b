"""Incremental text and stop strings. Knows no scheduler and no request.

The text of a generation is a pure function of its token ids. So a worker that takes a request over
replays the published ids and continues exactly where the text ended, even inside a character or a
stop string.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer

#: The decoded text of the bytes of an incomplete character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: The most undecided tokens that are decoded together. No character has as many tokens, so a
#: replacement character at the end is final then.
MAX_WINDOW_TOKENS = 64
#: Most bytes of a character, and so most tokens of a character.
MAX_CHARACTER_TOKENS = 4
#: Number of tokens at the end of a prompt that are decoded first; more are used if these have no
#: text or begin inside a character.
FEW_TOKENS = 8


class TokenDecoder(Protocol):
    """Takes token ids one by one, and returns text when it is final."""

    def step(self, token_id: int) -> str | None: ...

    def rest(self) -> str:
        """The decoded text of the tokens since the last text, even if it is incomplete."""
        ...


class StreamDecoder:
    """The text of the tokens after a prompt, as if prompt and tokens were decoded together.

    The text of a token may depend on the token before it: many tokenizers write a space before each
    word but the first. So a short window is decoded: the undecided tokens, preceded by the tokens
    of the last text or, at first, by the end of the prompt.

    A token has no text if the tokenizer does not know its id (a model with a padded vocabulary may
    produce such an id) or fails on it: decoding must never end a generation. If the tokenizer
    changes earlier text later (byte fallback does, for bytes that are not characters), the text
    that was already returned stays.

    `left_out` are the tokens that have no text, if these are not all special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        prompt: Sequence[int] = (),
        left_out: Collection[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens and left_out is None
        self._left_out = left_out or ()
        self._window = self._end_of(prompt)
        self._num_decided = len(self._window)
        self._num_known = len(self._decode(self._window))

    def step(self, token_id: int) -> str | None:
        window = self._window
        window.append(token_id)
        try:
            text = self._decode(window)
        except Exception:  # noqa: BLE001 - the library raises a bare Exception.
            window.pop()
            return None
        num_undecided = len(window) - self._num_decided
        if text.endswith(REPLACEMENT) and num_undecided < MAX_WINDOW_TOKENS:
            return None
        if len(text) <= self._num_known:
            if self._is_left_out(token_id):
                window.pop()
            return None
        new = text[self._num_known :]
        self._decide(text)
        return new

    def rest(self) -> str:
        return self._decode(self._window)[self._num_known :]

    def _decide(self, text: str) -> None:
        """Mark the whole window as decided; keep only tokens on which the next text may depend."""
        later = self._window[self._num_decided :]
        alone = self._decode(later)
        # Tokens of single bytes may decode to another text alone than together with bytes before
        # them.
        if text.endswith(alone) or len(self._window) >= MAX_WINDOW_TOKENS:
            self._window, text = later, alone
        self._num_decided, self._num_known = len(self._window), len(text)

    def _decode(self, token_ids: list[int]) -> str:
        if self._left_out:
            token_ids = [one for one in token_ids if one not in self._left_out]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt: enough to have text, and starting with a whole character."""
        count = FEW_TOKENS
        while True:
            end = list(prompt[-count:])
            # All starts inside a character are tried: with three tokens per character, for
            # instance, no power of two of tokens is a whole number of characters.
            for first in range(MAX_CHARACTER_TOKENS):
                text = self._decode(end[first:])
                if text and not text.startswith(REPLACEMENT):
                    return end[first:]
            if count >= len(prompt):
                return end
            count *= 2

    def _is_left_out(self, token_id: int) -> bool:
        """Whether the token never has text; a token that is only a space may get text later."""
        if token_id in self._left_out or self._tokenizer.id_to_token(token_id) is None:
            return True
        alone = [token_id]
        return self._skip_special_tokens and bool(
            self._tokenizer.decode(alone, skip_special_tokens=False) and not self._decode(alone)
        )


class Detokenizer:
    """The text of one generation, returned as soon as no later token can change it.

    The last `max(len(stop)) - 1` characters are held back, since a stop string may begin in them. A
    complete stop string ends the text: before the string, or after it with
    `include_stop_str_in_output`.

    Args:
        decoder: gets each output token once, in order.
        stop: strings that end the generation; the one that is complete first in the text wins.
        min_tokens: stop strings are ignored until more than this many tokens are generated.
        opening: text that the end of the prompt has begun and the output goes on with. It is
            returned before the text of the first token, and is no part of the search.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        opening: str = "",
    ) -> None:
        assert all(stop), "an empty stop string would end every generation"
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._hold_back = max((len(string) for string in stop), default=1) - 1
        self._num_tokens = 0
        self._opening = opening
        self._pending = ""
        self._stopped = False

    def append(self, token_id: int) -> bool:
        """Add the next output token; return whether a stop string is complete."""
        assert not self._stopped
        self._num_tokens += 1
        text = self._decoder.step(token_id)
        if text:
            self._add(text)
        return self._stopped

    def take_text(self, *, final: bool) -> str:
        """The text that has become final since the last call; all remaining text if `final`."""
        if final and not self._stopped:
            self._add(self._decoder.rest())
        text = self._pending
        keep = 0 if final or self._stopped else self._hold_back
        cut = max(0, len(text) - keep) if keep else len(text)
        self._pending = text[cut:]
        if self._opening and self._num_tokens:
            opening, self._opening = self._opening, ""
            return opening + text[:cut]
        return text[:cut]

    def _add(self, text: str) -> None:
        """Append text and search for stop strings that end inside the new text.

        Stop strings that end in older text were found before, or came before `min_tokens` and do
        not count: held-back text may contain a whole short stop string.
        """
        num_old = len(self._pending)
        self._pending += text
        if not self._stop or self._num_tokens <= self._min_tokens:
            return
        found = [
            (position + len(string), position)
            for string in self._stop
            if (position := self._pending.find(string, max(0, num_old - len(string) + 1))) >= 0
        ]
        if found:
            end, start = min(found)
            self._pending = self._pending[: end if self._include_stop else start]
            self._stopped = True
