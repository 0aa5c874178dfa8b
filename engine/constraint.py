"""What may come next in a generation that has to be of some form. Knows no form and no library."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: A bit for each token, that of token `id` being bit `id % 8` of byte `id // 8`.
TokenBits = NDArray[np.uint8]


class Constraint(Protocol):
    """Which tokens may follow the output of one generation.

    A function of that output alone. So a step that is planned again, a request that was preempted
    and one that was taken over from a dead worker are told the same, and nobody has to say that a
    token has come: each question brings all tokens, those of the question before first.
    """

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBits:
        """A bit for each token of the vocabulary, set where it may come next.

        An end of sequence may come exactly where the output may end. Where no bit is set the
        generation has failed.
        """
        ...

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """The output may end here, and can do nothing else."""
        ...

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        """A guess at what comes next, all of which may: what has to, spelled in some way.

        Where there is a choice, `guess` up to the first token that may not come.
        """
        ...

    def assuming(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> "Constraint":
        """One of its own for the output with `draft` behind it, to be asked of no other.

        This one is left where the output is. All of the draft may come.
        """
        ...

    @property
    def failure(self) -> str | None:
        """Why nothing may follow the tokens of the last question, if something is wrong."""
        ...


def allows(bits: TokenBits, token_id: int) -> bool:
    """Whether the bit of a token is set."""
    return bool(bits[token_id // 8] >> token_id % 8 & 1)


def why_no_token(constraint: Constraint | None) -> str:
    """The reason to give where no token could be chosen."""
    if constraint is None:
        return "no finite logit to choose from"
    return constraint.failure or "no token with a finite logit may come next"
