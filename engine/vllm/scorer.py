"""Log-probabilities of prompts, inside a rank of vLLM: from the hidden states that a step leaves.

They are those of the native engine, computed by its code. vLLM's own would be computed for a whole
chunk at once, with memory that nobody has set aside, and by code that it compiles at the first
request that wants them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from engine.config import MAX_SCORED_TOKENS
from engine.logprobs import Logprobs
from engine.model.device.transfer import index_on
from engine.model.sampling.likelihoods import PromptLikelihoods
from engine.sampling_params import SamplingParams
from engine.vllm.row import Row, Scores


class Piece(NamedTuple):
    """Tokens of one prompt that are scored together: those with the indices `scored`.

    `offset` is the row of the step's hidden states that belongs to token 0 of the prompt; it is
    negative if the step begins behind it.
    """

    request_id: str
    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    scored: range
    offset: int


def piece_of(row: Row, internal: str, computed: range, *, first: int) -> Piece:
    """What a step gives of one prompt; perhaps nothing.

    Args:
        row: asks for it.
        internal: the id that vLLM has given to the request.
        computed: indices of the tokens that the step computes.
        first: the row of the step's hidden states that belongs to the first of them.
    """
    prompt = row.prompt_token_ids
    scored = row.sampling.scored(computed.start, computed.stop, num_prompt_tokens=len(prompt))
    return Piece(internal, row.sampling, prompt, scored, first - computed.start)


class PromptScorer:
    """Scores the prompts of the steps of one model of vLLM's.

    A part needs as many rows of logits as a step may sample tokens, at most, and vLLM has measured
    the memory of those at its start.
    """

    def __init__(self, model: Any, *, max_num_seqs: int) -> None:
        self._model = model
        self._most = min(max_num_seqs, MAX_SCORED_TOKENS)

    @torch.inference_mode()
    def score(self, wanted: Sequence[Piece], hidden_states: torch.Tensor) -> Mapping[str, Scores]:
        """The log-probabilities of the pieces, by vLLM's id; call it before the step samples."""
        told: dict[str, list[Logprobs]] = {one.request_id: [] for one in wanted if one.scored}
        failures: dict[str, str] = {}
        for pieces in in_parts(wanted, most=self._most):
            places = [piece.offset + index - 1 for piece in pieces for index in piece.scored]
            hidden = hidden_states[index_on(places, hidden_states.device)]
            logits = self._model.compute_logits(hidden)
            found, failed = PromptLikelihoods(logits, pieces).wait()
            failures |= failed
            for request_id, logprobs in found.items():
                told[request_id] += logprobs
        first = {one.request_id: one.scored.start for one in wanted}
        return {id_: Scores(first[id_], told[id_], failures.get(id_)) for id_ in told}


def in_parts(wanted: Sequence[Piece], *, most: int) -> Iterator[Sequence[Piece]]:
    """The same, in order, in parts that score `most` tokens at most; each but the last so many."""
    part: list[Piece] = []
    room = most
    for piece in wanted:
        left = piece.scored
        while left:
            taken, left = left[:room], left[room:]
            part.append(piece._replace(scored=taken))
            room -= len(taken)
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def without_head_adapters(model: torch.nn.Module) -> None:
    """Leave the logits of a model of vLLM's as the model computes them, whatever the adapters.

    An adapter with tensors for the head is refused. vLLM adds the zeros of the others to one row of
    logits for each request, and fails on a CPU if there are more rows.
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA

    for layer in model.modules():
        if isinstance(layer, LogitsProcessorWithLoRA):
            layer.punica_wrapper = _NoHeadAdapters()


class _NoHeadAdapters:
    """In place of vLLM's code that adds the part of the adapters to logits, in place."""

    def add_lora_logits(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        """The logits."""
        return logits
