"""Log-probabilities of the chosen tokens, for rows that request them.

They are computed from the model's raw logits, in float32, before the sampler changes the logits.
Only reading them waits for the device.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.logprobs import Logprobs
from engine.model.device.transfer import ToHost, index_on
from engine.sampling_params import SamplingParams


class Requesting(Protocol):
    """A row that may request log-probabilities."""

    @property
    def sampling(self) -> SamplingParams: ...


class Likelihoods:
    """The log-probabilities of the rows of a step that request them.

    Args:
        logits: [rows, vocabulary] in float32, not yet changed by the sampler.
        requested: pairs of a row's index and its number of top tokens.
    """

    def __init__(self, logits: torch.Tensor, requested: Sequence[tuple[int, int]]) -> None:
        self._requested = requested
        self._rows = index_on([row for row, _ in requested], logits.device)
        self._logprobs = logits[self._rows].log_softmax(dim=-1)
        self._num_top = min(logits.shape[1], max(number for _, number in requested))
        self._top = self._logprobs.topk(self._num_top, dim=-1)
        self._arriving: ToHost | None = None

    @classmethod
    def for_rows(cls, logits: torch.Tensor, rows: Sequence[Requesting]) -> "Likelihoods | None":
        """The log-probabilities that `rows` request; None, at no cost, if no row does."""
        requested = [
            (index, row.sampling.logprobs)
            for index, row in enumerate(rows)
            if row.sampling.logprobs is not None
        ]
        return cls(logits, requested) if requested else None

    def send(self, tokens: torch.Tensor) -> None:
        """Start copying the log-probabilities of `tokens`, [rows of the step], to the host.

        Rows without a token (a negative id) get meaningless numbers.
        """
        chosen = tokens[self._rows].clamp(min=0)[:, None]
        columns = (self._logprobs.gather(1, chosen), self._top.values, self._top.indices)
        # One transfer for all: float32 values and ids are both exact in float64.
        self._arriving = ToHost(torch.cat([column.double() for column in columns], dim=1))

    def wait(self) -> dict[int, Logprobs]:
        """The log-probabilities sent last, by row index."""
        assert self._arriving is not None, "call `send` first"
        found = {}
        for (row, number), (own, *top) in zip(self._requested, self._arriving.wait(), strict=True):
            values, token_ids = top[:number], map(int, top[self._num_top :])
            found[row] = Logprobs(own, tuple(zip(token_ids, values, strict=False)))
        return found
