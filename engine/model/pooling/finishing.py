"""From pooled numbers to vectors: the kept dimensions, the length 1, or probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import BatchRow, StepResult, Vector
from engine.request import Pooling

#: The smallest length by which a vector is divided, as in torch.
SMALLEST_LENGTH = 1e-12


@dataclass(frozen=True, slots=True)
class Finish:
    """Makes vectors of length 1 if it `normalizes`; of scores it makes probabilities.

    Probabilities are the softmax of the scores, or the sigmoid of a single one.
    """

    normalizes: bool = False
    has_scores: bool = False

    def result(self, rows: Sequence[BatchRow], numbers: torch.Tensor) -> StepResult:
        """The result of a step, from the numbers [rows, width] of the rows that sample."""
        vectors: dict[str, Vector] = {}
        failures: dict[str, str] = {}
        for row, own in zip(rows, numbers.float().cpu().numpy(), strict=True):
            assert row.pooling is not None
            vector = self.vector(own, row.pooling)
            if np.isfinite(vector).all():
                vectors[row.request_id] = vector
            else:
                failures[row.request_id] = "its vector has numbers that are not finite"
        return StepResult(failures=failures, vectors=vectors)

    def vector(self, numbers: Vector, pooling: Pooling) -> Vector:
        """One vector [dimensions], from its pooled numbers [width]."""
        if self.has_scores:
            return probabilities(numbers) if pooling.activates else numbers.copy()
        kept: Vector = numbers[: pooling.dimensions].copy()
        if self.normalizes:
            kept /= max(float(np.linalg.norm(kept)), SMALLEST_LENGTH)
        return kept


def probabilities(scores: Vector) -> Vector:
    """The softmax of the scores [labels]; of a single one the sigmoid."""
    if len(scores) == 1:
        single: Vector = (1.0 / (1.0 + np.exp(-scores.astype(np.float64)))).astype(np.float32)
        return single
    exponents = np.exp(scores.astype(np.float64) - scores.max())
    shares: Vector = (exponents / exponents.sum()).astype(np.float32)
    return shares
