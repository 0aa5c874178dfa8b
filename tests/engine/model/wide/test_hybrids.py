"""Types with recurrent layers: served if a config has none, refused if it has one."""

import json

import pytest
import transformers

from engine.errors import ModelRefused
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    _GROUPED,
    Oracle,
    generate,
    make_prompt,
    make_request,
    make_runner,
    save_model,
)

PROMPTS = [make_prompt(length, salt=salt) for salt, length in enumerate((3, 17, 40, 29))]
NUM_TOKENS = 12

_GRANITE = _GROUPED | {
    "num_hidden_layers": 3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 32,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
_ATTENTION = ["full_attention"] * 3


def granite(**options):
    return transformers.GraniteMoeHybridConfig(**(_GRANITE | {"layer_types": _ATTENTION} | options))


SERVED = {
    "dense": granite(num_local_experts=0, position_embedding_type="rope"),
    "experts": granite(num_local_experts=4, position_embedding_type="rope"),
    "no positions": granite(num_local_experts=0),
}


@pytest.mark.parametrize("kind", SERVED)
def test_granite_without_a_recurrent_layer_gives_the_tokens_of_transformers(kind, tmp_path):
    folder = save_model(SERVED[kind], tmp_path)
    oracle = Oracle(folder)
    expected = {str(i): oracle.greedy(tuple(p), NUM_TOKENS) for i, p in enumerate(PROMPTS)}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PROMPTS)

    def requests(published=0):
        return [
            make_request(str(i), p, output=expected[str(i)][:published], max_tokens=NUM_TOKENS)
            for i, p in enumerate(PROMPTS)
        ]

    runner = make_runner(folder)
    assert generate(runner, requests()[1:2]).tokens == {"1": expected["1"]}
    assert generate(runner, requests(), max_num_batched_tokens=7).tokens == expected
    for mode in ("recompute", "swap"):
        preempted = generate(
            runner,
            requests(),
            num_blocks=20,
            preemption_mode=mode,
            enable_prefix_caching=False,
        )
        assert getattr(preempted.snapshot, f"preemptions_{mode}") > 0
        assert preempted.tokens == expected
    resumed = generate(runner, requests(published=5)).tokens
    assert resumed == {name: tokens[5:] for name, tokens in expected.items()}


@pytest.mark.parametrize("layer", range(3))
def test_granite_with_one_recurrent_layer_is_refused(layer, tmp_path):
    layers = [*_ATTENTION]
    layers[layer] = "linear_attention"
    save_model(granite(num_local_experts=0, layer_types=layers), tmp_path)
    with pytest.raises(ModelRefused, match=r"^granitemoehybrid has a recurrent state beside its"):
        load_model(tmp_path)


def test_older_checkpoints_call_these_layers_attention_and_mamba(tmp_path):
    folder = save_model(SERVED["dense"], tmp_path)
    config = json.loads((folder / "config.json").read_text())

    def rename(*layers):
        (folder / "config.json").write_text(json.dumps(config | {"layer_types": layers}))
        return folder

    load_model(rename("attention", "attention", "attention"))
    with pytest.raises(ModelRefused, match=r"^granitemoehybrid has a recurrent state"):
        load_model(rename("attention", "mamba", "attention"))
