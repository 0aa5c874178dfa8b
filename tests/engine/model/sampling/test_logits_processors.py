"""What each parameter does to the logits themselves; what is chosen from them: test_sampler."""

import math

import pytest
import torch

from engine.model.sampling.logits_processors import (
    add_biases,
    ban_early_stops,
    keep_allowed,
    penalize,
    process_logits,
)
from tests.engine.model.builders import make_row
from tests.engine.model.sampling.test_sampler import EOS, PARAMETERS, make_logits, make_rows

NEVER = -math.inf
PLAIN = {"temperature", "top_k", "top_p", "min_p"}


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_only_the_allowed_tokens_keep_their_logits_however_often_they_are_named():
    logits = logits_of([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    keep_allowed(logits, [make_row(allowed_token_ids=(2, 0, 2)), make_row()])
    assert logits.tolist() == [[1.0, NEVER, 3.0, NEVER], [5.0, 6.0, 7.0, 8.0]]


@pytest.mark.parametrize(("min_tokens", "banned"), [(2, False), (3, True)])
def test_ends_and_stop_tokens_are_banned_until_enough_tokens_are_out(min_tokens, banned):
    logits = logits_of([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    row = make_row(output=[2, 2], min_tokens=min_tokens, stop_token_ids=(0, 99))
    ban_early_stops(logits, [make_row(), row], eos_token_ids=frozenset({3}))
    expected = [NEVER, 6.0, 7.0, NEVER] if banned else [5.0, 6.0, 7.0, 8.0]
    assert logits.tolist() == [[1.0, 2.0, 3.0, 4.0], expected]


def test_a_bias_is_added_to_its_token_alone():
    logits = logits_of([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    add_biases(logits, [make_row(logit_bias=((0, 0.5), (2, -2.0))), make_row()])
    assert logits.tolist() == [[1.5, 2.0, 1.0], [4.0, 5.0, 6.0]]


def test_a_repetition_divides_what_is_positive_and_multiplies_what_is_negative():
    logits = logits_of([3.0, -3.0, 3.0, -3.0, 3.0])
    penalize(logits, [make_row([0, 1], output=[1, 2, 3], repetition_penalty=1.5)])
    assert logits.tolist() == [[2.0, -4.5, 2.0, -4.5, 3.0]]


def test_frequency_and_presence_take_from_what_is_in_the_output():
    logits = logits_of([4.0, 4.0, 4.0, 4.0])
    row = make_row([0, 1], output=[1, 2, 1], frequency_penalty=0.5, presence_penalty=0.25)
    penalize(logits, [row])
    assert logits.tolist() == [[4.0, 2.75, 3.25, 4.0]]


def test_a_repetition_comes_before_the_other_penalties():
    logits = logits_of([4.0])
    penalize(logits, [make_row([0], output=[0], repetition_penalty=2.0, presence_penalty=1.0)])
    assert logits.tolist() == [[1.0]]


def test_no_bias_brings_back_what_is_not_allowed_or_banned():
    logits = logits_of([1.0, 2.0, 3.0])
    row = make_row(
        allowed_token_ids=(0, 1), min_tokens=1, logit_bias=((0, 50.0), (1, 50.0), (2, 50.0))
    )
    process_logits(logits, [row], eos_token_ids=frozenset({1}))
    assert logits.tolist() == [[51.0, NEVER, NEVER]]


def test_penalties_see_the_biases():
    logits = logits_of([1.0, 2.0])
    row = make_row([0], logit_bias=((0, 3.0),), repetition_penalty=2.0)
    process_logits(logits, [row], eos_token_ids=EOS)
    assert logits.tolist() == [[2.0, 2.0]]


def test_each_row_is_processed_as_if_it_were_alone_and_a_plain_one_keeps_its_bits():
    rows, logits = make_rows(0), make_logits(len(PARAMETERS))
    before = logits.clone()
    process_logits(logits, rows, eos_token_ids=EOS)
    for index, (row, parameters) in enumerate(zip(rows, PARAMETERS, strict=True)):
        alone = before[index : index + 1].clone()
        process_logits(alone, [row], eos_token_ids=EOS)
        assert torch.equal(alone[0], logits[index])
        assert torch.equal(before[index], logits[index]) == (parameters.keys() <= PLAIN)
