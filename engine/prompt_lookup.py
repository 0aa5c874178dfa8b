"""Guesses the next tokens of a generation, to be checked in one step. Knows no model and no pool.

A guess costs nothing but a place in the step: a wrong one is dropped, and a right one is the very
token that would have been chosen, because the choice is a function of what stands before it.
"""

from collections.abc import Sequence

#: Tokens that have to have come before in the same order, for what followed them to be a guess.
GRAM = 3
#: What is looked up lies no further back, in tokens: an index of more would cost a step its time.
MAX_HISTORY = 16_384
#: The longest silence after guesses of which nothing came, in tokens.
MAX_SILENCE = 63

Gram = tuple[int, ...]


class PromptLookup:
    """What followed the last tokens of a request when they came before, in its prompt or output.

    Saxena, Prompt Lookup Decoding, 2023. As many tokens are guessed as lately were right, one at
    least; twice as many after a guess that was right to its end. After one of which nothing came
    follows a silence, which is the longer the more of them there were in a row.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        #: Where each gram that has come ends; the last place counts.
        self._ends: dict[Gram, int] = {}
        self._num_indexed = GRAM
        self._trust = 1
        self._silence = self._silent_until = 0
        self._guess: list[int] = []

    @property
    def num_known(self) -> int:
        """How many tokens of the request it was given."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens behind those it knows."""
        self._token_ids += token_ids

    def guess(self, *, most: int) -> list[int]:
        """Up to `most` tokens that may follow those it knows."""
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
            # What repeats itself may go on so: a period shorter than the guess goes round.
            period, length = end - found, min(most, self._trust)
            self._guess = [token_ids[found + place % period] for place in range(length)]
        return self._guess

    def learn(self, draft: Sequence[int], *, num_right: int) -> None:
        """Take in how many tokens of a draft came, if it was the last guess."""
        if not draft or list(draft) != self._guess[: len(draft)]:
            return
        self._trust = 2 * len(draft) if num_right == len(draft) else max(1, num_right)
        if num_right:
            self._silence = self._silent_until = 0
        else:
            # The token that came instead is known, and so many more have to be.
            self._silence = min(2 * self._silence + 1, MAX_SILENCE)
            self._silent_until = self._num_indexed + 1 + self._silence
