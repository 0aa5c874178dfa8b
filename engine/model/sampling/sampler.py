"""Samples the next token of every row: per-row parameters in one batched pass, in float32.

Knows no request states. Its random numbers come from `engine.model.sampling.noise`, which computes
them from the seed. A row's token depends on that row alone, never on other rows. The order of the
operations and the meaning of every parameter are those of vLLM: allowed tokens, constraints, bans,
biases, penalties, the greedy branch, temperature, min_p, top_k, top_p, draw.

The tokens that min_p, top_k and top_p keep are always those whose scaled logit reaches a threshold,
tokens equal to the last one included. So drawing among the best candidates is enough if the
threshold is above the worst candidate, or if the worst candidate is masked. Only for other rows the
whole vocabulary is sorted. Both ways give the same token, since the threshold is the same and the
noise is a function of the token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from engine.logprobs import Logprobs
from engine.model.causal_model import BROKEN
from engine.model.device.transfer import index_on, to_device
from engine.model.sampling.fused_draw import FusedDraw
from engine.model.sampling.likelihoods import Likelihoods, PromptLikelihoods
from engine.model.sampling.logits_processors import Processed, process_logits
from engine.model.sampling.noise import gumbel, noise_keys
from engine.sampling_params import SamplingParams

#: Number of best tokens that are candidates at first, before the whole vocabulary is sorted.
MAX_CANDIDATES = 256
#: Most bytes of noise over whole vocabularies drawn at once (but at least one row): on a CPU as
#: much as fits in its cache, on other devices enough to amortise the kernel launches.
CPU_NOISE_BYTES, DEVICE_NOISE_BYTES = 1 << 18, 1 << 26
#: The smallest temperature by which float32 can divide. At far higher temperatures, the draw
#: already is the most likely token.
MIN_TEMPERATURE = 1e-30

#: The candidates could not decide the draw: this minus the best of them stands for the token.
_UNDECIDED = -3


class Drawn(Processed, Protocol):
    """The inputs of sampling except the logits; a row and a request both have them."""

    @property
    def request_id(self) -> str: ...


class Draws:
    """The sampled tokens of some rows, on the device.

    Args:
        tokens: [rows] ids; `BROKEN` for a failed row, `_UNDECIDED` or less for an undecided draw.
        drawn: indices of the rows whose draws can be undecided: those that truncate.
        scaled: [drawn, vocabulary], scaled logits to settle undecided draws; None if there are
            none.
        keys: [drawn, 2], keys of the noise. They are stored because the live rows may have one more
            token when the draws are settled.
        likelihoods: log-probabilities of the rows that request them; None if no row does.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        rows: Sequence[Drawn],
        *,
        drawn: Sequence[int] = (),
        scaled: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        likelihoods: Likelihoods | None = None,
    ) -> None:
        self.tokens = tokens
        self._rows = rows
        self._drawn = drawn
        self._scaled = scaled
        self._keys = keys
        self._likelihoods = likelihoods
        #: The likelihoods of prompts that the same step scores; None if it scores none.
        self.prompts: PromptLikelihoods | None = None
        if likelihoods is not None:
            likelihoods.send(tokens)

    def guesses(self) -> torch.Tensor:
        """[rows] ids of the vocabulary, without waiting: of undecided draws the best candidates."""
        best = torch.where(self.tokens <= _UNDECIDED, _UNDECIDED - self.tokens, self.tokens)
        return best.clamp_(min=0)

    def settle(self, chosen: list[int]) -> bool:
        """Decide undecided draws, in `chosen` and in `tokens`; return whether there were any.

        Args:
            chosen: `tokens` on the host. `BROKEN` entries stay.
        """
        undecided = [index for index, token in enumerate(chosen) if token <= _UNDECIDED]
        if not undecided:
            return False
        scaled, keys = self._scaled, self._keys
        assert scaled is not None and keys is not None
        places = {index: place for place, index in enumerate(self._drawn)}
        with torch.inference_mode():
            parts = []
            for some in _parts(undecided, scaled):
                where = index_on([places[index] for index in some], scaled.device)
                rows = [self._rows[index] for index in some]
                parts.append(_draw_whole(scaled[where], rows, keys[where]))
            tokens = torch.cat(parts)
            self.tokens[index_on(undecided, tokens.device)] = tokens
            for index, token in zip(undecided, tokens.tolist(), strict=True):
                chosen[index] = token
            if self._likelihoods is not None:
                self._likelihoods.send(self.tokens)
        return True

    def logprobs(self, chosen: list[int]) -> dict[int, Logprobs]:
        """The log-probabilities of the settled tokens, by row index, for rows that request them.

        If the log-probability is not finite, the row's entry in `chosen` becomes `BROKEN`.
        """
        found = {} if self._likelihoods is None else self._likelihoods.wait()
        for index, one in found.items():
            if not math.isfinite(one.logprob):
                chosen[index] = BROKEN
        return found


def guess_of(token: int) -> int:
    """What `Draws.guesses` has for this entry of `Draws.tokens`."""
    return max(0, _UNDECIDED - token if token <= _UNDECIDED else token)


class Sampler:
    """Samples tokens; has settings, but no state.

    Args:
        fused: draws from whole vocabularies on the device; None for torch operations.
        eos_token_ids: masked, like `stop_token_ids`, until a row has `min_tokens` output tokens.
            `ignore_eos` has no effect here: it decides what an EOS does, not whether it may come.
        max_candidates: see the module's docstring; it changes only the speed.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        *,
        max_candidates: int = MAX_CANDIDATES,
        fused: FusedDraw | None = None,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._fused = fused
        self._max_candidates = max_candidates

    def draw(self, logits: torch.Tensor, rows: Sequence[Drawn]) -> Draws:
        """Sample one token per row without waiting for the device; overwrites `logits`.

        `logits` are [rows, vocabulary]. A batch in which all rows are greedy and have no other
        parameters takes the fast path at the top.
        """
        assert logits.shape[0] == len(rows)
        logits = logits.float()
        if take_argmax(rows):
            return Draws(_argmax(logits), rows)
        likelihoods = Likelihoods.for_rows(logits, rows)
        process_logits(logits, rows, eos_token_ids=self._eos_token_ids)
        tokens = _best(logits)
        best = logits.gather(1, tokens[:, None])
        drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
        truncated = [index for index in drawn if _truncates(rows[index].sampling)]
        if whole := [index for index in drawn if not _truncates(rows[index].sampling)]:
            tokens[index_on(whole, tokens.device)] = self._draw(logits, best, rows, whole)
        scaled = keys = None
        if truncated:
            truncated_rows = [rows[index] for index in truncated]
            scaled = _scale(logits, best, truncated, truncated_rows)
            keys = _keys(truncated_rows, tokens.device)
            tokens[index_on(truncated, tokens.device)] = _draw_candidates(
                scaled, truncated_rows, keys, min(self._max_candidates, logits.shape[1])
            )
        finite = best[:, 0].abs() < math.inf
        tokens = torch.where(finite, tokens, BROKEN)
        return Draws(
            tokens, rows, drawn=truncated, scaled=scaled, keys=keys, likelihoods=likelihoods
        )

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, rows: Sequence[Drawn], whole: list[int]
    ) -> torch.Tensor:
        """[whole] tokens of the rows with the indices `whole`, which truncate nothing."""
        device = logits.device
        if self._fused is not None:
            drawn = [rows[index] for index in whole]
            return self._fused(
                logits,
                rows=index_on(whole, device),
                best=best,
                temperatures=_temperatures(drawn, device),
                keys=_keys(drawn, device),
            )
        tokens = []
        for some in _parts(whole, logits):
            drawn = [rows[index] for index in some]
            scaled = _scale(logits, best, some, drawn)
            tokens.append(_draw_whole(scaled, drawn, _keys(drawn, device)))
        return torch.cat(tokens)


def take_argmax(rows: Sequence[Drawn]) -> bool:
    """Whether every row's token is the argmax of its raw logits."""
    return all(row.sampling.takes_argmax and row.constraint is None for row in rows)


def _truncates(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _scale(
    logits: torch.Tensor, best: torch.Tensor, index: Sequence[int], rows: Sequence[Drawn]
) -> torch.Tensor:
    """[rows, vocabulary], logits / temperature, shifted to a maximum of 0 to avoid overflow.

    `index` are the indices of `rows` in `logits`.
    """
    where = index_on(index, logits.device)
    return (logits[where] - best[where]).div_(_temperatures(rows, logits.device))


def _temperatures(rows: Sequence[Drawn], device: torch.device) -> torch.Tensor:
    sampling = [row.sampling for row in rows]
    return _column(sampling, lambda one: max(one.temperature, MIN_TEMPERATURE), device)


def _parts(index: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    """`index` in parts; the noise of the vocabulary for one part is drawn at once."""
    noise_bytes = CPU_NOISE_BYTES if logits.device.type == "cpu" else DEVICE_NOISE_BYTES
    size = max(1, noise_bytes // (logits.shape[1] * torch.float64.itemsize))
    return (index[first : first + size] for first in range(0, len(index), size))


def _draw_candidates(
    scaled: torch.Tensor, rows: Sequence[Drawn], keys: torch.Tensor, size: int
) -> torch.Tensor:
    """[rows] tokens drawn from the `size` best of each row; undecided if these are too few."""
    values, token_ids = scaled.topk(size, dim=-1)
    threshold = _threshold(scaled, values, [row.sampling for row in rows])
    scores = values.double() + gumbel(token_ids.int(), keys)
    scores.masked_fill_(values < threshold, -math.inf)
    tokens = token_ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    if size == scaled.shape[1]:
        return tokens
    top_k = _column([row.sampling for row in rows], lambda one: one.top_k, scaled.device)
    worst = values[:, -1:]
    # If the worst candidate is masked, every token that is not masked is a candidate.
    decided = (worst == -math.inf) | ((threshold > worst) & (top_k <= size))
    return torch.where(decided[:, 0], tokens, _UNDECIDED - tokens)


def _draw_whole(scaled: torch.Tensor, rows: Sequence[Drawn], keys: torch.Tensor) -> torch.Tensor:
    """[rows] tokens drawn from the whole vocabulary, without candidates."""
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    scores = gumbel(token_ids, keys).add_(scaled)
    sampling = [row.sampling for row in rows]
    if any(map(_truncates, sampling)):
        threshold = _threshold(scaled, _sorted_values(scaled), sampling)
        scores.masked_fill_(scaled < threshold, -math.inf)
    return scores.argmax(dim=-1)


def _sorted_values(scaled: torch.Tensor) -> torch.Tensor:
    """The values of [rows, vocabulary], largest first, without token ids."""
    if scaled.device.type != "cpu":
        return scaled.sort(dim=-1, descending=True).values
    # Without the ids, numpy's vectorised sort is dozens of times as fast as torch's.
    return torch.from_numpy(-np.sort(-scaled.numpy(), axis=-1))


def _threshold(
    scaled: torch.Tensor, values: torch.Tensor, sampling: Sequence[SamplingParams]
) -> torch.Tensor:
    """[rows, 1], the smallest scaled logit that min_p, then top_k, then top_p keep.

    `values` are the candidates of `scaled`, best first. top_p is a share of the probability mass of
    all tokens in the vocabulary that min_p and top_k keep; the mass is summed in double precision.
    """
    device, size = values.device, values.shape[1]
    threshold = _column(
        sampling, lambda one: math.log(one.min_p) if one.min_p > 0.0 else -math.inf, device
    )
    if any(one.top_k for one in sampling):
        top_k = _column(sampling, lambda one: min(one.top_k, size), device).long()
        worst = values.gather(1, (top_k - 1).clamp_(min=0))
        threshold = torch.where(top_k > 0, torch.maximum(threshold, worst), threshold)
    if any(one.top_p < 1.0 for one in sampling):
        top_p = _column(sampling, lambda one: one.top_p, device, np.float64)
        mass = torch.where(scaled >= threshold, scaled.exp(), 0.0).sum(
            dim=-1, keepdim=True, dtype=torch.float64
        )
        probabilities = values.exp().double()
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = (before < top_p * mass) & (values >= threshold)
        last = (kept.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
        worst = values.gather(1, last)
        threshold = torch.where(top_p < 1.0, torch.maximum(threshold, worst), threshold)
    return threshold


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """[rows] the argmax of each row, `BROKEN` if its logit is not finite; the first of equals."""
    tokens = _best(logits)
    if logits.device.type == "cpu":
        # After a large model the instruction cache is cold, and numpy runs far less code than
        # torch.
        chosen = tokens.numpy()
        chosen[~np.isfinite(logits.numpy()[np.arange(len(chosen)), chosen])] = BROKEN
        return tokens
    best = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(best.abs() < math.inf, tokens, BROKEN)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """[rows] the argmax of each row, the first of equal ones; a NaN counts as the largest."""
    if logits.device.type == "cpu":  # Takes a sixth of torch's time.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _keys(rows: Sequence[Drawn], device: torch.device) -> torch.Tensor:
    draws = [(row.sampling.seed, row.output_index) for row in rows]
    return to_device(noise_keys(draws), device)


def _column(
    sampling: Sequence[SamplingParams],
    parameter: Callable[[SamplingParams], float],
    device: torch.device,
    dtype: type[np.floating[Any]] = np.float32,
) -> torch.Tensor:
    """[rows, 1], the value of one parameter for each row."""
    return to_device(np.array([[parameter(one)] for one in sampling], dtype=dtype), device)
