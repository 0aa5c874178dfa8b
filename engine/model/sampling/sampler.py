"""From logits to the next token of every row: per-row parameters in one batched pass, in float32.

Knows no request states and draws no random numbers of its own: `engine.model.sampling.noise` makes
them from the seed. A row's token depends on that row alone, never on its neighbours. The order of
the steps and the meaning of every parameter are vLLM's: allowed tokens, constraints, bans, biases,
penalties, the greedy branch, temperature, min_p, top_k, top_p, draw.

What survives min_p, top_k and top_p is always "every token whose scaled logit reaches a threshold",
tokens tied with the last one included. So a draw among the few best candidates is enough whenever
the threshold lies above the worst of them, or the worst is masked; only for the other rows is the
whole vocabulary sorted. Both ways give the same token, because the threshold is the same and the
noise is a function of the token.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from engine.logprobs import Logprobs
from engine.model.causal_model import BROKEN
from engine.model.device.transfer import index_on, to_device
from engine.model.sampling.likelihoods import Likelihoods
from engine.model.sampling.logits_processors import Processed, process_logits
from engine.model.sampling.noise import gumbel, noise_keys
from engine.sampling_params import SamplingParams

#: How many of the best tokens are tried as candidates before the whole vocabulary is sorted.
MAX_CANDIDATES = 256
#: Most noise over whole vocabularies that is drawn at once, if it is more than one row's: on a CPU
#: what stays in its cache, elsewhere enough to be worth the launches.
CPU_NOISE_BYTES, DEVICE_NOISE_BYTES = 1 << 18, 1 << 26
#: Below this temperature float32 cannot divide by it; the draw is the most likely token long
#: before.
MIN_TEMPERATURE = 1e-30

#: In place of a token id: the candidates did not decide.
_UNDECIDED = -1


class Drawn(Processed, Protocol):
    """What the choice of a next token depends on, besides the logits; a row or a request has it."""

    @property
    def request_id(self) -> str: ...


class Draws:
    """The tokens of some rows, chosen on the device.

    Args:
        tokens: [rows] ids; `BROKEN` where there is none, `_UNDECIDED` where there is none yet.
        drawn: indices of the rows that are drawn and not greedy.
        scaled: [drawn, vocabulary], scaled logits to settle draws with; None if all are decided.
        keys: [drawn, 2], of the noise; kept because the live rows may have grown by a token by
            the time they are settled.
        likelihoods: of the rows that ask for them; None where none does.
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
        if likelihoods is not None:
            likelihoods.send(tokens)

    def settle(self, chosen: list[int]) -> bool:
        """Decide the undecided draws, in `chosen` and in `tokens`; returns whether there were any.

        Args:
            chosen: `tokens` on the host; `BROKEN` is left as it is.
        """
        if _UNDECIDED not in chosen:
            return False
        with torch.inference_mode():
            for index in [index for index, token in enumerate(chosen) if token == _UNDECIDED]:
                assert self._scaled is not None and self._keys is not None
                one = slice(position := self._drawn.index(index), position + 1)
                token = _draw_whole(self._scaled[one], [self._rows[index]], self._keys[one])
                chosen[index] = int(token)
                self.tokens[index] = chosen[index]
            if self._likelihoods is not None:
                self._likelihoods.send(self.tokens)
        return True

    def logprobs(self, chosen: list[int]) -> dict[int, Logprobs]:
        """Log-probabilities of the settled tokens, by the indices of the rows that ask.

        A row whose log-probability is not finite loses its token: `BROKEN` is put in `chosen`.
        """
        found = {} if self._likelihoods is None else self._likelihoods.wait()
        for index, one in found.items():
            if not math.isfinite(one.logprob):
                chosen[index] = BROKEN
        return found


class Sampler:
    """Chooses tokens; has no state but its settings.

    Args:
        eos_token_ids: banned, together with `stop_token_ids`, until `min_tokens` are out.
            `ignore_eos` decides what an EOS does, not whether it may come: no part of sampling.
        max_candidates: see the module's docstring; only the speed depends on it.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], *, max_candidates: int = MAX_CANDIDATES
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_candidates = max_candidates

    def draw(self, logits: torch.Tensor, rows: Sequence[Drawn]) -> Draws:
        """One token per row; overwrites `logits`, [rows, vocabulary]; does not wait for a device.

        Every row of a greedy batch without further parameters takes the fast path at the top.
        """
        assert logits.shape[0] == len(rows)
        logits = logits.float()
        if take_likeliest(rows):
            return Draws(_likeliest(logits), rows)
        likelihoods = Likelihoods.asked_for(logits, rows)
        process_logits(logits, rows, eos_token_ids=self._eos_token_ids)
        tokens = _best(logits)
        best = logits.gather(1, tokens[:, None])
        drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
        scaled = keys = None
        if drawn:
            drawn_rows = [rows[index] for index in drawn]
            scaled = _scale(logits, best, [row.sampling for row in drawn_rows], drawn)
            keys = _keys(drawn_rows, tokens.device)
            tokens[index_on(drawn, tokens.device)] = self._draw(scaled, drawn_rows, keys)
        finite = best[:, 0].abs() < math.inf
        tokens = torch.where(finite, tokens, BROKEN)
        # Only truncated draws can be left undecided; for others this would just hold memory.
        if not any(_truncates(rows[index].sampling) for index in drawn):
            scaled = None
        return Draws(tokens, rows, drawn=drawn, scaled=scaled, keys=keys, likelihoods=likelihoods)

    def _draw(
        self, scaled: torch.Tensor, rows: Sequence[Drawn], keys: torch.Tensor
    ) -> torch.Tensor:
        """[rows] tokens, `_UNDECIDED` where the candidates were too few."""
        vocab_size, device = scaled.shape[1], scaled.device
        truncated = [index for index, row in enumerate(rows) if _truncates(row.sampling)]
        whole = [index for index, row in enumerate(rows) if not _truncates(row.sampling)]
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        if truncated:
            where = index_on(truncated, device)
            tokens[where] = _draw_candidates(
                scaled[where],
                [rows[index] for index in truncated],
                keys[where],
                min(self._max_candidates, vocab_size),
            )
        noise_bytes = CPU_NOISE_BYTES if device.type == "cpu" else DEVICE_NOISE_BYTES
        size = max(1, noise_bytes // (vocab_size * torch.float64.itemsize))
        for some in (whole[first : first + size] for first in range(0, len(whole), size)):
            where = index_on(some, device)
            tokens[where] = _draw_whole(scaled[where], [rows[index] for index in some], keys[where])
        return tokens


def take_likeliest(rows: Sequence[Drawn]) -> bool:
    """Whether all rows are greedy over their raw logits."""
    return all(row.sampling.takes_likeliest and row.constraint is None for row in rows)


def _truncates(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _scale(
    logits: torch.Tensor, best: torch.Tensor, sampling: Sequence[SamplingParams], index: list[int]
) -> torch.Tensor:
    """[drawn, vocabulary], logits over temperature, shifted so that the best is 0: no overflow."""
    where = index_on(index, logits.device)
    temperatures = _column(
        sampling, lambda one: max(one.temperature, MIN_TEMPERATURE), logits.device
    )
    return (logits[where] - best[where]).div_(temperatures)


def _draw_candidates(
    scaled: torch.Tensor, rows: Sequence[Drawn], keys: torch.Tensor, size: int
) -> torch.Tensor:
    """[rows] tokens drawn from the `size` best of each; `_UNDECIDED` where they are too few."""
    values, token_ids = scaled.topk(size, dim=-1)
    threshold = _threshold(scaled, values, [row.sampling for row in rows])
    scores = values.double() + gumbel(token_ids.int(), keys)
    scores.masked_fill_(values < threshold, -math.inf)
    tokens = token_ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    if size == scaled.shape[1]:
        return tokens
    top_k = _column([row.sampling for row in rows], lambda one: one.top_k, scaled.device)
    worst = values[:, -1:]
    # If the worst candidate is masked, every token that may come is among the candidates.
    decided = (worst == -math.inf) | ((threshold > worst) & (top_k <= size))
    return tokens.masked_fill_(~decided[:, 0], _UNDECIDED)


def _draw_whole(scaled: torch.Tensor, rows: Sequence[Drawn], keys: torch.Tensor) -> torch.Tensor:
    """[rows] tokens drawn from all that survive of the whole vocabulary."""
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    scores = gumbel(token_ids, keys).add_(scaled)
    sampling = [row.sampling for row in rows]
    if any(map(_truncates, sampling)):
        threshold = _threshold(scaled, _sorted_values(scaled), sampling)
        scores.masked_fill_(scaled < threshold, -math.inf)
    return scores.argmax(dim=-1)


def _sorted_values(scaled: torch.Tensor) -> torch.Tensor:
    """The values of [rows, vocabulary], best first; a threshold needs no token ids."""
    if scaled.device.type != "cpu":
        return scaled.sort(dim=-1, descending=True).values
    # Without the ids, numpy's vectorised sort is dozens of times as fast as torch's.
    return torch.from_numpy(-np.sort(-scaled.numpy(), axis=-1))


def _threshold(
    scaled: torch.Tensor, values: torch.Tensor, sampling: Sequence[SamplingParams]
) -> torch.Tensor:
    """[rows, 1], the smallest scaled logit that survives min_p, then top_k, then top_p.

    `values` are the candidates of `scaled`, best first. top_p is a share of the probability mass of
    all tokens of the vocabulary that survive min_p and top_k, summed in double precision.
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


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """[rows] the first token with each row's largest logit; `BROKEN` where that is not finite."""
    tokens = _best(logits)
    if logits.device.type == "cpu":
        # After a large model the caches are cold, and numpy touches far less code than torch.
        chosen = tokens.numpy()
        chosen[~np.isfinite(logits.numpy()[np.arange(len(chosen)), chosen])] = BROKEN
        return tokens
    best = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(best.abs() < math.inf, tokens, BROKEN)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """[rows] the first token with each row's largest logit; a NaN counts as the largest."""
    if logits.device.type == "cpu":  # A sixth of the time that torch takes.
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
    """[rows, 1], one parameter of every row."""
    return to_device(np.array([[parameter(one)] for one in sampling], dtype=dtype), device)
