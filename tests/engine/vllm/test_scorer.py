"""Prompts are scored in parts of bounded size, from the right rows of a step of vLLM's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from engine.logprobs import Logprobs
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.vllm.row import Row, Scores
from engine.vllm.scorer import Piece, PromptScorer, in_parts, piece_of

VOCAB, WIDTH = 20, 8


def row(name: str, length: int, *, output=(), **sampling: Any) -> Row:
    prompt = [(3 * index + length) % VOCAB for index in range(length)]
    params = SamplingParams(max_tokens=4, **sampling)
    return Row(Request(name, prompt, params, arrival_time=0.0, output_token_ids=list(output)))


class Model:
    """Logits of hidden states, and how many rows of them were wanted at once."""

    def __init__(self) -> None:
        self.head = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(5))
        self.sizes: list[int] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden))
        return hidden @ self.head


class Step:
    """What vLLM computes for chunks of rows: their beginning and length."""

    def __init__(self, rows: list[Row], chunks: list[tuple[int, int]]) -> None:
        self.model = Model()
        self.states = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(7))
        places = np.cumsum([0, *(length for _, length in chunks)]).tolist()
        self.pieces = [
            piece_of(one, f"{one.request_id}-vllm", range(start, start + length), first=first)
            for one, (start, length), first in zip(rows, chunks, places, strict=False)
            if one.wants_scores
        ]
        # A token's state depends on its position alone, so that the expected values are simple.
        hidden = torch.cat([self.states[start : start + length] for start, length in chunks])
        padding = torch.full((5, WIDTH), torch.nan)
        self.hidden_states = torch.cat([hidden, padding])

    def score(self, *, most: int) -> Mapping[str, Scores]:
        scorer = PromptScorer(self.model, max_num_seqs=most)
        return scorer.score(self.pieces, self.hidden_states)

    def expected(self, of: Row, index: int) -> Logprobs:
        logprobs = (self.states[index - 1] @ self.model.head).log_softmax(dim=-1)
        top = logprobs.topk(of.sampling.prompt_logprobs or 0)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Logprobs(logprobs[of.prompt_token_ids[index]].item(), tuple(pairs))


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_each_row_gets_what_its_chunk_tells_in_parts_of_bounded_size(most):
    rows = [
        row("whole", 9, prompt_logprobs=2),
        row("silent", 6),
        row("middle", 30, prompt_logprobs=0),
        row("end", 20, prompt_logprobs=3, prompt_logprobs_from=17),
        row("before", 30, prompt_logprobs=1, prompt_logprobs_from=25),
        row("one", 1, prompt_logprobs=1),
    ]
    step = Step(rows, [(0, 9), (0, 6), (7, 4), (12, 8), (0, 5), (0, 1)])
    found = step.score(most=most)
    indices = {"whole": range(1, 9), "middle": range(8, 12), "end": range(17, 20)}
    assert found.keys() == {f"{name}-vllm" for name in indices}
    for one in rows:
        if one.request_id not in indices:
            continue
        scores, scored = found[f"{one.request_id}-vllm"], indices[one.request_id]
        assert (scores.first, len(scores.logprobs)) == (scored.start, len(scored))
        assert scores.failure is None
        for index, told in zip(scored, scores.logprobs, strict=True):
            wanted = step.expected(one, index)
            assert told.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [id_ for id_, _ in told.top] == [id_ for id_, _ in wanted.top]
            assert dict(told.top) == pytest.approx(dict(wanted.top), abs=1e-5)
    assert sum(step.model.sizes) == 8 + 4 + 3 and max(step.model.sizes) <= most


def test_a_state_that_is_no_number_fails_its_own_prompt():
    rows = [row("good", 5, prompt_logprobs=1), row("bad", 5, prompt_logprobs=1)]
    step = Step(rows, [(0, 5), (0, 5)])
    step.hidden_states[7] = torch.nan
    found = step.score(most=3)
    assert found["bad-vllm"].failure == "a log-probability of the prompt is not a number"
    assert found["good-vllm"].failure is None and len(found["good-vllm"].logprobs) == 4


def test_a_step_without_askers_computes_nothing():
    step = Step([row("a", 5)], [(0, 5)])
    assert step.score(most=3) == {}
    assert step.model.sizes == []


def test_a_row_with_output_wants_nothing_more():
    assert row("a", 5, prompt_logprobs=1).wants_scores
    assert not row("a", 5).wants_scores
    assert not row("a", 5, prompt_logprobs=1, output=[7]).wants_scores
    begun = row("a", 5, prompt_logprobs=1)
    live: list[int] = []
    begun.attach(live)
    assert begun.wants_scores
    live.append(7)
    assert not begun.wants_scores


def test_parts_are_full_and_keep_the_order():
    params = SamplingParams(max_tokens=1)
    pieces = [
        Piece(name, params, (), scored, 0)
        for name, scored in (("a", range(1, 6)), ("b", range(3, 5)), ("c", range(0)))
    ]
    parts = [[(one.request_id, one.scored) for one in part] for part in in_parts(pieces, most=3)]
    assert parts == [
        [("a", range(1, 4))],
        [("a", range(4, 6)), ("b", range(3, 4))],
        [("b", range(4, 5))],
    ]
