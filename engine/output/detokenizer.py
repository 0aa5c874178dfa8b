"""Incremental text and stop strings. Knows no scheduler and no request.

The text of a generation is a pure function of its token ids. A worker that takes a request over
therefore replays the published ids and goes on exactly where the text was left, in the middle of a
character or of a stop string.
"""

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

#: What the bytes of an unfinished character decode to.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: The most undecided tokens that are decoded together. No character has so many, so a replacement
#: character that is still there then is final.
MAX_WINDOW_TOKENS = 64
#: A character has at most this many bytes, and so this many tokens.
MAX_CHARACTER_TOKENS = 4
#: Tokens at the end of a prompt that are decoded first; more if they have no text or begin within a
#: character.
FEW_TOKENS = 8


class TokenDecoder(Protocol):
    """One token id in, the text that became final out."""

    def step(self, token_id: int) -> str | None: ...

    def rest(self) -> str:
        """What the tokens since the last text decode to by themselves, however incomplete."""
        ...


class StreamDecoder:
    """The text of tokens that follow a prompt, as decoding prompt and tokens at once would add it.

    The text of a token may depend on the one before it: many tokenizers write a space before a word
    unless it is the first. So a short window is decoded: the undecided tokens, and before them
    those of the last text, or at first the end of the prompt.

    A token has no text if the tokenizer does not know its id, which a model with a padded
    vocabulary may produce, or fails on it: text must never end a generation by accident. If the
    tokenizer later changes text it has given before (byte fallback does, for bytes that are no
    characters), what was returned stays.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
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
        """The whole window is decided: keep only the tokens that the next text may depend on."""
        later = self._window[self._num_decided :]
        alone = self._decode(later)
        # Bytes out of a run that is decoded as a whole may have another text by themselves.
        if text.endswith(alone) or len(self._window) >= MAX_WINDOW_TOKENS:
            self._window, text = later, alone
        self._num_decided, self._num_known = len(self._window), len(text)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """As many last tokens of a prompt as have text, if any, and begin at a whole character."""
        count = FEW_TOKENS
        while True:
            end = list(prompt[-count:])
            # With three tokens to each character, no power of two is a whole number of them.
            for first in range(MAX_CHARACTER_TOKENS):
                text = self._decode(end[first:])
                if text and not text.startswith(REPLACEMENT):
                    return end[first:]
            if count >= len(prompt):
                return end
            count *= 2

    def _is_left_out(self, token_id: int) -> bool:
        """Whether the token has no text anywhere; one that is only a space may get some later."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        alone = [token_id]
        return self._skip_special_tokens and bool(
            self._tokenizer.decode(alone, skip_special_tokens=False) and not self._decode(alone)
        )


class Detokenizer:
    """The text of one generation, returned as soon as no later token can change it.

    The last `max(len(stop)) - 1` characters are held back while a stop string may still begin in
    them. A completed stop string ends the text before it, or after it with
    `include_stop_str_in_output`.

    Args:
        decoder: fed with each output token once, in order.
        stop: strings that end the generation; the one completed earliest in the text wins.
        min_tokens: no stop string counts while no more than this many tokens are out.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        assert all(stop), "an empty stop string would end every generation"
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._hold_back = max((len(string) for string in stop), default=1) - 1
        self._num_tokens = 0
        self._pending = ""
        self._stopped = False

    def append(self, token_id: int) -> bool:
        """Take the next output token; True once a stop string is complete."""
        assert not self._stopped
        self._num_tokens += 1
        text = self._decoder.step(token_id)
        if text:
            self._add(text)
        return self._stopped

    def take_text(self, *, final: bool) -> str:
        """The text that became final since the last call; all that is left when `final`."""
        if final and not self._stopped:
            self._add(self._decoder.rest())
        text = self._pending
        keep = 0 if final or self._stopped else self._hold_back
        cut = max(0, len(text) - keep) if keep else len(text)
        self._pending = text[cut:]
        return text[:cut]

    def _add(self, text: str) -> None:
        """Append text and look for stop strings that end inside it.

        Older text was searched, or does not count: what it holds of a longer string's beginning may
        well be the whole of a shorter one.
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
