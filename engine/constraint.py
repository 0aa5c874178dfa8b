"""Which tokens may come next in a constrained generation. Knows no grammar and no library."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

#: A bit per token of the vocabulary: that of token `id` is bit `id % 8` of byte `id // 8`.
TokenBitmask = NDArray[np.uint8]


class Failure(NamedTuple):
    """Why a constraint allows no token.

    Args:
        message: one sentence for the author of the request.
        field: of the request, if it is at fault; None if the output does not keep to it here.
    """

    message: str
    field: str | None = None


class Constraint(Protocol):
    """Which tokens may follow the output of one generation.

    A function of that output alone, so the answer is the same for a step that is planned again, a
    preempted request and one taken over from a dead worker. Nobody reports new tokens: each call
    passes the whole output, which begins with that of the call before.
    """

    @property
    def field(self) -> str:
        """The field of the request that asked for it."""
        ...

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """The tokens that may come next.

        An end of sequence may come exactly where the output may end. If no bit is set, the
        generation has failed.
        """
        ...

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the output may end here and nothing else can follow."""
        ...

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        """Draft tokens for what comes next, all of them allowed.

        Where the text is determined, one way to spell it in tokens; where there is a choice, the
        part of `guess` before the first token that is not allowed.
        """
        ...

    def assuming(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> "Constraint":
        """A separate Constraint, only for the output followed by `draft`; this one is unchanged.

        All tokens of the draft must be allowed.
        """
        ...

    @property
    def failure(self) -> Failure | None:
        """Why no token may follow the output of the last call, if something went wrong."""
        ...


def allows(bits: TokenBitmask, token_id: int) -> bool:
    """Whether the bit of a token is set."""
    return bool(bits[token_id // 8] >> token_id % 8 & 1)


def why_no_token(constraint: Constraint | None) -> str:
    """The error message for a row for which no token could be chosen."""
    if constraint is None:
        return "no finite logit to choose from"
    failure = constraint.failure
    return failure.message if failure else "no token with a finite logit may come next"
