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
    forbid = _forbid if logits.device.type == "cpu" else _forbid_on_device
    forbid(logits, [index for index, _, _ in found], allowed)


def _forbid(logits: torch.Tensor, rows: Sequence[int], allowed: NDArray[np.uint8]) -> None:
    """Minus infinity in `rows` of the logits wherever `allowed`, [rows, width], is 0; in place."""
    for row, mask in zip(rows, allowed, strict=True):
        _forbid_in_words(logits[row].numpy().view(np.int32), mask)


def _forbid_on_device(
    logits: torch.Tensor, rows: Sequence[int], allowed: NDArray[np.uint8]
) -> None:
    """The same, and nobody waits."""
    masks = to_device(allowed == 0, logits.device)
    for row, forbidden in zip(rows, masks, strict=True):
        logits[row].masked_fill_(forbidden, -math.inf)


def _forbid_in_words(words: NDArray[np.int32], allowed: NDArray[np.uint8]) -> None:
    """The same in one row, whose numbers in single precision are taken for `words`.

    An allowed one keeps its bits, any other gets all of them and keeps those of minus infinity. To
    ask at each takes up to five times as long.
    """
    bits = (allowed.view(np.int8) - 1).astype(np.int32)
    words |= bits
    np.invert(bits, out=bits)
    bits |= MINUS_INFINITY
    words &= bits
