"""Changes logits by the parameters of their rows, before sampling; in place and in float32.

Knows no temperature and no randomness. Only logits that a parameter names are accessed, so a row
without such parameters costs almost nothing. A row's logits depend on that row alone.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.device.transfer import index_on, to_device
from engine.model.sampling.token_bitmask import Constrained, apply_token_bitmasks
from engine.sampling_params import SamplingParams


class Processed(Constrained, Protocol):
    """A row whose parameters may change its logits."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


def process_logits(
    logits: torch.Tensor, rows: Sequence[Processed], *, eos_token_ids: frozenset[int]
) -> None:
    """Apply all processors to [rows, vocabulary], in place and in vLLM's order."""
    keep_allowed(logits, rows)
    apply_token_bitmasks(logits, rows)
    ban_early_stops(logits, rows, eos_token_ids=eos_token_ids)
    add_biases(logits, rows)
    penalize(logits, rows)


def keep_allowed(logits: torch.Tensor, rows: Sequence[Processed]) -> None:
    """In rows with a list of allowed tokens, mask all other tokens."""
    allowed = [
        (index, token) for index, row in enumerate(rows) for token in row.sampling.allowed_token_ids
    ]
    if not allowed:
        return
    where, token_ids = index_on(allowed, logits.device).unbind(1)
    kept = logits[where, token_ids]
    logits[index_on(sorted({index for index, _ in allowed}), logits.device)] = -math.inf
    logits[where, token_ids] = kept


def ban_early_stops(
    logits: torch.Tensor, rows: Sequence[Processed], *, eos_token_ids: frozenset[int]
) -> None:
    """Mask EOS and stop tokens in rows with fewer than `min_tokens` output tokens."""
    vocab_size = logits.shape[1]
    banned = [
        (index, token)
        for index, row in enumerate(rows)
        if row.output_index < row.sampling.min_tokens
        for token in eos_token_ids.union(row.sampling.stop_token_ids)
        if token < vocab_size
    ]
    if banned:
        where, token_ids = index_on(banned, logits.device).unbind(1)
        logits[where, token_ids] = -math.inf


def add_biases(logits: torch.Tensor, rows: Sequence[Processed]) -> None:
    """Add each row's `logit_bias`."""
    biases = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.sampling.logit_bias
    ]
    if not biases:
        return
    indices, tokens, values = zip(*biases, strict=True)
    where, token_ids = (index_on(each, logits.device) for each in (indices, tokens))
    logits[where, token_ids] += to_device(np.array(values, dtype=np.float32), logits.device)


def penalize(logits: torch.Tensor, rows: Sequence[Processed]) -> None:
    """Apply the repetition penalty (prompt and output), then frequency and presence (output).

    A repetition penalty divides positive logits and multiplies negative ones (Keskar et al., CTRL,
    2019). Only tokens that occur are accessed.
    """
    indices, tokens, factors, discounts = [], [], [], []
    for index, row in enumerate(rows):
        if not row.sampling.has_penalties:
            continue
        generated, times = np.unique(_as_array(row.output_token_ids), return_counts=True)
        # Marked in a table, because sorting the tokens of a long prompt takes several times as
        # long.
        occurs = np.zeros(logits.shape[1], dtype=np.bool_)
        occurs[generated] = True
        if row.sampling.repetition_penalty != 1.0:
            occurs[_as_array(row.prompt_token_ids)] = True
        seen = occurs.nonzero()[0]
        discount = np.zeros(len(seen))
        discount[np.searchsorted(seen, generated)] = (
            row.sampling.frequency_penalty * times + row.sampling.presence_penalty
        )
        indices.append(np.full(len(seen), index))
        tokens.append(seen)
        factors.append(np.full(len(seen), row.sampling.repetition_penalty))
        discounts.append(discount)
    if not indices:
        return
    device = logits.device
    where, which = (to_device(np.concatenate(parts), device) for parts in (indices, tokens))
    factor, discount_all = (
        to_device(np.concatenate(parts).astype(np.float32), device)
        for parts in (factors, discounts)
    )
    scores = logits[where, which]
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    logits[where, which] = scores - discount_all


def _as_array(token_ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)
