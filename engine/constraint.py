"""Which tokens may come next in a constrained generation. Knows no grammar and no library."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

#: One bit per token of the vocabulary; that of token `id` is bit `id % 8` of byte `id // 8`.
TokenBitmask = NDArray[np.uint8]


class Failure(NamedTuple):
    """Why a constraint allows no token.

    Args:
        message: one sentence for the author of the request.
        field: the field of the request that causes the failure; None if the constraint itself is
            fine, but the output so far violates it.
    """

    message: str
    field: str | None = None


class Mask(Protocol):
    """Which tokens may come next, as far as sampling asks."""

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """The tokens that may come next.

        An end-of-sequence token is allowed exactly where the output may end. If no bit is set, the
        generation has failed.
        """
        ...

    @property
    def failure(self) -> Failure | None:
        """Why no token may follow the output of the last call; None without a failure."""
        ...


class Constraint(Mask, Protocol):
    """Which tokens may follow the output of one generation.

    Its answers depend on that output alone, so they are the same for a step that is planned again,
    a preempted request, and a request taken over from a dead worker. New tokens are not reported
    separately: each call passes the whole output, which extends the output of the call before.
    """

    @property
    def field(self) -> str:
        """The field of the request that specifies it."""
        ...

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the output may end here and no other token may follow."""
        ...

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        """Draft the next tokens, all of them allowed.

        If the constraint determines the next text, this is one tokenization of that text; otherwise
        it is the part of `guess` before the first token that is not allowed.
        """
        ...

    def assuming(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> "Constraint":
        """A separate Constraint, only for the output followed by `draft`; this one is unchanged.

        All tokens of the draft must be allowed.
        """
        ...


def allows(bits: TokenBitmask, token_id: int) -> bool:
    """Whether the bit of a token is set."""
    return bool(bits[token_id // 8] >> token_id % 8 & 1)


def why_no_token(constraint: Mask | None) -> str:
    """The error message for a row without a possible next token."""
    if constraint is None:
        return "no finite logit to choose from"
    failure = constraint.failure
    return failure.message if failure else "no token with a finite logit may come next"
