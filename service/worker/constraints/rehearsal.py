"""Rehearses a constraint with outputs at random, to find out before a request whether it can go on.

Some limits on a constraint are reached only in the middle of an output. Knows no library.
"""

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from engine.constraint import Constraint, Failure

#: For each output, how likely it closes a text, a list or an object where it may. The first output
#: is about the first text, and the last one reaches the end of most schemas.
CLOSING = (0.0, 0.3, 0.9)
#: The most tokens of each output.
MAX_TOKENS = 64


def failure_of(
    start: Callable[[], Constraint], *, closing: NDArray[np.bool_], ends: Collection[int]
) -> Failure | None:
    """Why one of the outputs cannot go on; None if all can. The outputs are always the same ones.

    Args:
        start: makes a constraint for another output.
        closing: for each token, whether it begins with a mark that closes something.
        ends: the tokens that end an output.
    """
    chance = np.random.default_rng(0)
    for likelihood in CLOSING:
        constraint, output = start(), list[int]()
        while len(output) < MAX_TOKENS:
            ids = np.flatnonzero(np.unpackbits(constraint.allowed(output), bitorder="little"))
            if constraint.failure is not None:
                return constraint.failure
            closers = ids[closing[ids]]
            chosen = closers if len(closers) and chance.random() < likelihood else ids
            if not len(chosen):
                break
            output.append(int(chance.choice(chosen)))
            if output[-1] in ends or constraint.is_complete(output):
                break
    return None
