"""Masks the logits of tokens that constraints forbid, from bitmasks. Knows no grammar."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.constraint import Mask
from engine.model.device.transfer import index_on, to_device

#: The bit pattern of minus infinity in float32, as an integer.
MINUS_INFINITY = np.float32(-math.inf).view(np.int32)


class Constrained(Protocol):
    """A row that may have a constraint."""

    @property
    def output_token_ids(self) -> Sequence[int]: ...

    @property
    def output_index(self) -> int: ...

    @property
    def constraint(self) -> Mask | None: ...


def apply_token_bitmasks(logits: torch.Tensor, rows: Sequence[Constrained]) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place, in rows with a constraint.

    A token without a bit in the mask is forbidden. Bits beyond the vocabulary are ignored.
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
    forbid = _forbid if logits.device.type == "cpu" else _forbid_on_device
    forbid(logits, [index for index, _, _ in found], np.stack(bits))


def _forbid(logits: torch.Tensor, rows: Sequence[int], bits: NDArray[np.uint8]) -> None:
    """Set logits in `rows` to minus infinity, in place, where their `bits` are 0."""
    allowed = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little")
    for row, mask in zip(rows, allowed, strict=True):
        _forbid_in_words(logits[row].numpy().view(np.int32), mask)


def _forbid_on_device(logits: torch.Tensor, rows: Sequence[int], bits: NDArray[np.uint8]) -> None:
    """Like `_forbid`, but does not wait: the device unpacks the bits of all rows at once."""
    width, device = logits.shape[1], logits.device
    missing = max(0, -(-width // 8) - bits.shape[1])
    packed = to_device(np.pad(bits, ((0, 0), (0, missing))), device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    allowed = ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :width]
    where = index_on(rows, device)
    logits[where] = logits[where].masked_fill_(allowed == 0, -math.inf)


def _forbid_in_words(words: NDArray[np.int32], allowed: NDArray[np.uint8]) -> None:
    """Like `_forbid`, for one row; `words` are its float32 logits, reinterpreted as int32.

    The bits of an allowed logit do not change. All bits of a forbidden logit are set to 1, and then
    masked to those of minus infinity. Selecting by condition would take up to five times as long.
    """
    bits = (allowed.view(np.int8) - 1).astype(np.int32)
    words |= bits
    np.invert(bits, out=bits)
    bits |= MINUS_INFINITY
    words &= bits
