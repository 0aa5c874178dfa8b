"""Takes from logits what constraints forbid. Knows neither what they are nor how they know."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.constraint import Constraint
from engine.model.transfer import to_device

#: Its bits in single precision, as a number.
MINUS_INFINITY = np.float32(-math.inf).view(np.int32)


class Constrained(Protocol):
    """A row that may have a constraint."""

    @property
    def output_token_ids(self) -> Sequence[int]: ...

    @property
    def output_index(self) -> int: ...

    @property
    def constraint(self) -> Constraint | None: ...


def keep_what_may_come(logits: torch.Tensor, rows: Sequence[Constrained]) -> None:
    """Where a row has a constraint, no token that it forbids can come; in place.

    Rows without one cost a look at each. A token without a bit cannot come, a bit without a token
    is nobody's.
    """
    found = [
        (index, row.constraint, row) for index, row in enumerate(rows) if row.constraint is not None
    ]
    if not found:
        return
    bits = []
    for _, constraint, row in found:
        assert row.output_index == len(row.output_token_ids), "a step was launched too early"
        bits.append(constraint.allowed(row.output_token_ids))
    allowed = np.unpackbits(np.stack(bits), axis=1, count=logits.shape[1], bitorder="little")
    if logits.device.type == "cpu":
        for (index, _, _), mask in zip(found, allowed, strict=True):
            _forbid(logits[index].numpy(), mask)
    else:
        masks = to_device(allowed == 0, logits.device)
        for (index, _, _), forbidden in zip(found, masks, strict=True):
            logits[index].masked_fill_(forbidden, -math.inf)


def _forbid(logits: NDArray[np.float32], allowed: NDArray[np.uint8]) -> None:
    """Minus infinity wherever `allowed` is 0; in place.

    Numbers are handled as words: an allowed one keeps its bits, and any other gets all of them and
    keeps those of minus infinity. To ask at each takes up to five times as long.
    """
    bits = (allowed.view(np.int8) - 1).astype(np.int32)
    words = logits.view(np.int32)
    words |= bits
    np.invert(bits, out=bits)
    bits |= MINUS_INFINITY
    words &= bits
