"""Log-probabilities of the chosen tokens and of those of prompts, for rows that request them.

They are computed from the model's raw logits, in float32, before the sampler changes the logits.
Only reading them waits for the device.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

from engine.logprobs import Logprobs
from engine.model.device.transfer import ToHost, index_on
from engine.sampling_params import SamplingParams


class Requesting(Protocol):
    """A row that may request log-probabilities."""

    @property
    def sampling(self) -> SamplingParams: ...


class Scoring(Requesting, Protocol):
    """A row that may request log-probabilities of its prompt: those of the indices `scored`."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def scored(self) -> range: ...


class Likelihoods:
    """The log-probabilities of the rows of a step that request them.

    Args:
        logits: [rows, vocabulary] in float32, not yet changed by the sampler.
        requested: pairs of a row's index and its number of top tokens.
    """

    def __init__(self, logits: torch.Tensor, requested: Sequence[tuple[int, int]]) -> None:
        self._requested = requested
        self._rows = index_on([row for row, _ in requested], logits.device)
        # Every row asks where prompts are scored: to copy the widest tensor takes as long as this.
        picked = logits if len(requested) == len(logits) else logits[self._rows]
        self._logprobs = picked.log_softmax(dim=-1)
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


class PromptLikelihoods:
    """The log-probabilities of the tokens that the rows of a step score; see `BatchRow.scored`.

    Args:
        logits: [scored tokens, vocabulary], those of all rows in their order.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[Scoring]) -> None:
        self._scored = [(row.request_id, len(row.scored)) for row in rows if row.scored]
        numbers = [
            (row.sampling.prompt_logprobs or 0, row.prompt_token_ids[index])
            for row in rows
            for index in row.scored
        ]
        self._likelihoods = Likelihoods(
            logits.float(), [(index, most) for index, (most, _) in enumerate(numbers)]
        )
        self._likelihoods.send(index_on([token_id for _, token_id in numbers], logits.device))

    def wait(self) -> tuple[dict[str, Sequence[Logprobs]], dict[str, str]]:
        """By request id: the log-probabilities; and why a row has none, if one is no number."""
        told = self._likelihoods.wait()
        found: dict[str, Sequence[Logprobs]] = {}
        failures: dict[str, str] = {}
        first = 0
        for request_id, count in self._scored:
            of_row = [told[index] for index in range(first, first + count)]
            first += count
            numbers = chain.from_iterable((one.logprob, *(v for _, v in one.top)) for one in of_row)
            if any(map(math.isnan, numbers)):
                failures[request_id] = "a log-probability of the prompt is not a number"
            found[request_id] = of_row
        return found, failures
