"""Prompt lookup: drafts what followed the last tokens earlier. Knows no model and no pool."""

from collections.abc import Sequence

#: Length of the n-grams that are looked up, in tokens.
GRAM = 3
#: How far back a match may lie, in tokens: to index more would take too much time of a step.
MAX_HISTORY = 16_384
#: The most tokens for which nothing is guessed after guesses that were wrong.
MAX_SILENCE = 63

Gram = tuple[int, ...]


class PromptLookup:
    """What followed the last tokens of a request when they came before, in its prompt or output.

    Saxena, Prompt Lookup Decoding, 2023. The next guess is as long as the accepted part of the last
    one, but at least one token, and twice as long if all of it was accepted. If none was, nothing
    is guessed for a number of tokens, which doubles with every such guess in a row.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        #: Where each n-gram ends, one past its last token; the latest occurrence counts.
        self._ends: dict[Gram, int] = {}
        self._num_indexed = GRAM
        self._trust = 1
        self._silence = self._silent_until = 0
        self._guess: list[int] = []

    @property
    def num_known(self) -> int:
        """How many tokens of the request it has been given."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the request's next tokens."""
        self._token_ids += token_ids

    def guess(self, *, most: int) -> list[int]:
        """Up to `most` tokens that may come next."""
        token_ids, end = self._token_ids, self.num_known
        if end < self._silent_until:
            self._guess = []
            return self._guess
        oldest = end - MAX_HISTORY
        for place in range(max(self._num_indexed, oldest), end):
            self._ends[tuple(token_ids[place - GRAM : place])] = place
        self._num_indexed = max(end, GRAM)
        if len(self._ends) > 2 * MAX_HISTORY:
            self._ends = {gram: place for gram, place in self._ends.items() if place >= oldest}
        found = self._ends.get(tuple(token_ids[-GRAM:]), -1)
        if found < max(oldest, 0):
            self._guess = []
        else:
            # The text since the match may be a repeating pattern: go round it for a longer guess.
            period, length = end - found, min(most, self._trust)
            self._guess = [token_ids[found + place % period] for place in range(length)]
        return self._guess

    def learn(self, draft: Sequence[int], *, num_right: int) -> None:
        """Note how many tokens of a draft were accepted; ignored if it was not the last guess."""
        if not draft or list(draft) != self._guess[: len(draft)]:
            return
        self._trust = 2 * len(draft) if num_right == len(draft) else max(1, num_right)
        if num_right:
            self._silence = self._silent_until = 0
        else:
            # Counted from after the token that came instead of the draft.
            self._silence = min(2 * self._silence + 1, MAX_SILENCE)
            self._silent_until = self._num_indexed + 1 + self._silence
