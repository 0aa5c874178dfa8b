"""A model that numbers the tokens of a step itself is refused, even if its first step is right."""

import pytest
import torch

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.wide.loader import load_model


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_rotary_positions_that_count_the_tokens_of_a_step_are_refused(name, model_folder):
    """Within one step the distances of a prompt's tokens are right, and so is its attention."""
    loaded = load_model(model_folder(name))
    rotary = loaded.model.model.rotary_emb
    forward = rotary.forward

    def counting(hidden, position_ids):
        return forward(hidden, torch.arange(position_ids.shape[-1]).expand_as(position_ids))

    rotary.forward = counting
    with pytest.raises(ModelRefused, match="has other logits with paged attention"):
        probe(loaded.model, max_model_len=256)
