"""Incremental text and stop strings. Knows no scheduler and no request.

The text of a generation is a pure function of its token ids. A worker that takes a request over
therefore replays the published ids and goes on exactly where the text was left, in the middle of a
character or of a stop string.
"""

from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TokenDecoder(Protocol):
    """One token id in, the text that became certain out."""

    def step(self, token_id: int) -> str | None: ...

    def rest(self) -> str:
        """What the tokens since the last text decode to by themselves, however incomplete."""
        ...


class StreamDecoder:
    """`tokenizers`' DecodeStream with its two sharp edges covered.

    It raises when a token takes back text it has already given out ("invalid prefix"), and then
    stays broken: a new stream goes on from there. It raises, too, on ids the tokenizer does not
    know, which a model with a padded vocabulary may well produce: they have no text. Nor has a
    token that even a new stream refuses: text must never end a generation by accident.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._undecided: list[int] = []

    def step(self, token_id: int) -> str | None:
        if self._tokenizer.id_to_token(token_id) is None:
            return None
        self._undecided.append(token_id)
        text = None
        for _ in range(2):
            try:
                text = self._stream.step(self._tokenizer, token_id)
                break
            except Exception:  # noqa: BLE001 - the library raises a bare Exception.
                self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        else:
            self._undecided.pop()
        if text is not None:
            self._undecided.clear()
        return text

    def rest(self) -> str:
        text: str = self._tokenizer.decode(
            self._undecided, skip_special_tokens=self._skip_special_tokens
        )
        return text


class Detokenizer:
    """The text of one generation, given out as soon as no later token can change it.

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
        """The text that became certain since the last call; all that is left when `final`."""
        if final and not self._stopped:
            self._add(self._decoder.rest())
        keep = 0 if final or self._stopped else self._hold_back
        cut = max(0, len(self._pending) - keep)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def _add(self, text: str) -> None:
        """Append text and look for stop strings that end inside it: older text was searched."""
        searched_from = max(0, len(self._pending) - self._hold_back)
        self._pending += text
        if self._num_tokens <= self._min_tokens:
            return
        found = [
            (position + len(string), position)
            for string in self._stop
            if (position := self._pending.find(string, searched_from)) >= 0
        ]
        if found:
            end, start = min(found)
            self._pending = self._pending[: end if self._include_stop else start]
            self._stopped = True
