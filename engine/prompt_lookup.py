"""Prompt lookup: drafts the tokens that followed the same n-gram earlier. Knows no model."""

from collections.abc import Sequence

#: Length of an n-gram, in tokens.
GRAM = 3
#: The farthest distance of a match, in tokens: indexing more would take too much of a step's time.
MAX_HISTORY = 16_384
#: The most tokens without a guess after wrong guesses.
MAX_SILENCE = 63

Gram = tuple[int, ...]


class PromptLookup:
    """Guesses the next tokens of a request: those after the last earlier match of its last n-gram.

    Saxena, Prompt Lookup Decoding, 2023. The next guess is as long as the accepted part of the last
    guess, but at least one token; it is twice as long as the last guess if all of it was accepted.
    If no token was accepted, there are no guesses for a number of tokens, which doubles with each
    consecutive failure.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        #: For each n-gram, the index after its latest occurrence.
        self._ends: dict[Gram, int] = {}
        self._num_indexed = GRAM
        self._next_length = 1
        self._silence = self._silent_until = 0
        self._guess: list[int] = []

    @property
    def num_known(self) -> int:
        """The number of tokens of the request that `extend` has added."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the request's next tokens."""
        self._token_ids += token_ids

    def guess(self, *, most: int) -> list[int]:
        """Guess up to `most` next tokens."""
        token_ids, end = self._token_ids, self.num_known
        if end < self._silent_until:
            self._guess = []
            return self._guess
        oldest = end - MAX_HISTORY
        for index in range(max(self._num_indexed, oldest), end):
            self._ends[tuple(token_ids[index - GRAM : index])] = index
        self._num_indexed = max(end, GRAM)
        if len(self._ends) > 2 * MAX_HISTORY:
            self._ends = {gram: index for gram, index in self._ends.items() if index >= oldest}
        found = self._ends.get(tuple(token_ids[-GRAM:]), -1)
        if found < max(oldest, 0):
            self._guess = []
        else:
            # The tokens since the match may be a repeating pattern: repeat them for a longer guess.
            period, length = end - found, min(most, self._next_length)
            self._guess = [token_ids[found + index % period] for index in range(length)]
        return self._guess

    def learn(self, draft: Sequence[int], *, num_right: int) -> None:
        """Record how many tokens of a draft were accepted; ignored if it was not the last guess."""
        if not draft or list(draft) != self._guess[: len(draft)]:
            return
        self._next_length = 2 * len(draft) if num_right == len(draft) else max(1, num_right)
        if num_right:
            self._silence = self._silent_until = 0
        else:
            # Counted from after the token that was sampled instead of the draft.
            self._silence = min(2 * self._silence + 1, MAX_SILENCE)
            self._silent_until = self._num_indexed + 1 + self._silence
