"""Log-probabilities of the chosen tokens, for the rows that ask. Knows not how they were chosen.

They are those of the model's raw logits, in float32, whatever is done to the logits afterwards. The
device is waited for only when they are read.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.logprobs import Logprobs
from engine.model.device.transfer import ToHost, index_on
from engine.sampling_params import SamplingParams


class Asking(Protocol):
    """A row that may ask for log-probabilities."""

    @property
    def sampling(self) -> SamplingParams: ...


class Likelihoods:
    """The log-probabilities of the rows of a step that ask for them.

    Args:
        logits: [rows, vocabulary] in float32, not yet changed by the sampler.
        asking: indices of the rows that ask, each with its number of top tokens.
    """

    def __init__(self, logits: torch.Tensor, asking: Sequence[tuple[int, int]]) -> None:
        self._asking = asking
        self._rows = index_on([row for row, _ in asking], logits.device)
        self._logprobs = logits[self._rows].log_softmax(dim=-1)
        self._num_top = min(logits.shape[1], max(number for _, number in asking))
        self._top = self._logprobs.topk(self._num_top, dim=-1)
        self._arriving: ToHost | None = None

    @classmethod
    def asked_for(cls, logits: torch.Tensor, rows: Sequence[Asking]) -> "Likelihoods | None":
        """None if no row asks, at no cost."""
        asking = [
            (index, row.sampling.logprobs)
            for index, row in enumerate(rows)
            if row.sampling.logprobs is not None
        ]
        return cls(logits, asking) if asking else None

    def send(self, tokens: torch.Tensor) -> None:
        """Start copying the log-probabilities of these tokens, [rows] of the step, to the host.

        A row without a token, that is a negative one, gets meaningless numbers.
        """
        chosen = tokens[self._rows].clamp(min=0)[:, None]
        columns = (self._logprobs.gather(1, chosen), self._top.values, self._top.indices)
        # One transfer: floats and ids are both exact in double precision.
        self._arriving = ToHost(torch.cat([column.double() for column in columns], dim=1))

    def wait(self) -> dict[int, Logprobs]:
        """What was sent last, by the indices of the rows."""
        assert self._arriving is not None, "`send` comes first"
        found = {}
        for (row, number), (own, *top) in zip(self._asking, self._arriving.wait(), strict=True):
            values, token_ids = top[:number], map(int, top[self._num_top :])
            found[row] = Logprobs(own, tuple(zip(token_ids, values, strict=False)))
        return found
