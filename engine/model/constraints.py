"""Takes from logits what constraints forbid. Knows neither what they are nor how they know."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine.constraint import Constraint
from engine.model.transfer import to_device


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
    masks = to_device(allowed == 0, logits.device)
    # Row by row: on a CPU a row is changed where it lies, and all at once would be copied twice.
    for (index, _, _), mask in zip(found, masks, strict=True):
        logits[index].masked_fill_(mask, -math.inf)
