"""In Triton's interpreter the kernel that draws gives the tokens of torch operations."""

import math

import pytest
import torch

from engine.model.sampling import fused_draw as fused_module
from engine.model.sampling.fused_draw import FusedDraw, check_draw
from tests.engine.model.builders import Chooser, make_row
from tests.engine.model.sampling.test_sampler import EOS, make_logits, make_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [1, 300, 1024, 1025, 32_000])
def test_the_draws_pass_the_check_that_they_are_put_to_at_load(vocab_size):
    check_draw(FusedDraw(), CPU, vocab_size)


@pytest.mark.parametrize("tile", [32, 1024])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_batch_gets_the_tokens_that_torch_operations_draw(seed, tile, monkeypatch):
    """Masks and biases among them, and logits that are no numbers."""
    monkeypatch.setattr(fused_module, "TILE", tile)
    rows = make_rows(seed)
    logits = make_logits(len(rows), seed=seed)
    logits[1, 4], logits[2, 5] = math.nan, math.inf
    expected = Chooser(EOS).sample(logits.clone(), rows)
    assert Chooser(EOS, fused=FusedDraw()).sample(logits, rows) == expected


def test_many_draws_from_near_ties_and_ties_are_those_of_torch_operations():
    """A few distinct logits, so that the noise decides nearly alone."""
    rows = [make_row(temperature=1.5, seed=n) for n in range(300)]
    logits = make_logits(len(rows), spread=1.0, vocabulary=2000).round()
    expected = Chooser(EOS).sample(logits.clone(), rows)
    assert Chooser(EOS, fused=FusedDraw()).sample(logits, rows) == expected


def test_another_noise_would_be_seen(monkeypatch):
    """The control: an offset of the kernel's hash that is one too small."""
    draw = FusedDraw()
    launch = draw._launch

    def other_keys(name, grid, logits, rows, best, temperatures, keys, *rest, **constants):
        launch(name, grid, logits, rows, best, temperatures, keys - 1, *rest, **constants)

    draw._launch = other_keys
    with pytest.raises(ArithmeticError, match="a kernel draws"):
        check_draw(draw, CPU, 1000)
