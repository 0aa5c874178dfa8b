"""Types that may have recurrent layers: served with and without."""

import json

import pytest
import transformers

from engine.model.wide.loader import load_model
from tests.engine.model.builders import _GROUPED, Oracle, check_generated, make_runner, save_model

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
    "a recurrent layer": granite(
        num_local_experts=0,
        layer_types=["full_attention", "linear_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("kind", SERVED)
def test_granite_gives_the_tokens_of_transformers(kind, tmp_path):
    folder = save_model(SERVED[kind], tmp_path)
    check_generated(make_runner(folder), Oracle(folder).alone())


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("dense", ["attention"] * 3), ("a recurrent layer", ["attention", "mamba", "attention"])],
)
def test_older_checkpoints_call_these_layers_attention_and_mamba(kind, layers, tmp_path):
    folder = save_model(SERVED[kind], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": layers}))
    kinds = load_model(folder).model.config.layer_types
    assert kinds == SERVED[kind].layer_types
