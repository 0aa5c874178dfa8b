"""Types that may have recurrent layers: served with and without, and by the fast path."""

import json

import pytest
import transformers

from engine.cache.state_tags import StateTags
from engine.errors import DeviceFailed
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    _GROUPED,
    Oracle,
    check_generated,
    generate,
    make_runner,
    requests_of,
    save_model,
)
from tests.engine.model.decoders import FAMILIES

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


CONVOLUTIONS = [name for name in FAMILIES if name.startswith("lfm2")]
DELTA_NETS = [name for name in FAMILIES if name.startswith("qwen3.5") and "only" not in name]
STATE_SPACES = [name for name in FAMILIES if name.startswith("granite 4") and "only" not in name]
KINDS = [CONVOLUTIONS[0], DELTA_NETS[0], STATE_SPACES[0]]


@pytest.mark.parametrize("name", CONVOLUTIONS + DELTA_NETS + STATE_SPACES)
def test_the_fast_path_has_the_tokens_of_transformers_preempted_and_resumed(name, tmp_path):
    folder = save_model(FAMILIES[name], tmp_path)
    runner, expected = make_runner(folder, model_path="fast"), Oracle(folder).alone()
    assert isinstance(runner.model, NativeDecoder) and runner.config_facts.states.num_slots == 8
    check_generated(runner, expected)


@pytest.mark.parametrize("path", ["fast", "wide"])
def test_a_convolution_of_one_tap_has_a_state_of_no_bytes(path, tmp_path):
    layers = ["full_attention", "conv"]
    config = transformers.Lfm2Config(**_GROUPED, layer_types=layers, conv_L_cache=1)
    folder = save_model(config, tmp_path)
    runner = make_runner(folder, model_path=path)
    assert runner.kv_pool.states.bytes_per_state == 0
    check_generated(runner, Oracle(folder).alone())


@pytest.mark.parametrize("unit", ["num_blocks", "kv_cache_memory_bytes"])
def test_default_snapshots_leave_the_memory_of_a_pool_whose_size_is_set(
    unit, tmp_path, monkeypatch
):
    """They take a tenth of what is free behind the slots and that pool."""
    folder = save_model(FAMILIES[CONVOLUTIONS[0]], tmp_path)
    pool = make_runner(folder, num_state_snapshots=0).kv_pool
    # Slots, and four copies of the states that one of the two layers reads.
    slots = pool.states.nbytes + 4 * 8 * pool.states.bytes_per_state // 2
    free = slots + 128 * pool.bytes_per_block + 35 * pool.states.bytes_per_state
    monkeypatch.setattr("engine.model.load.states.free_memory_bytes", lambda device: free)
    size = 128 if unit == "num_blocks" else 128 * pool.bytes_per_block
    runner = make_runner(folder, **({"num_blocks": None} | {unit: size}))
    assert runner.config_facts.num_blocks == 128
    assert runner.config_facts.states.num_snapshots == 3


@pytest.mark.parametrize("name", KINDS)
def test_on_the_fast_path_every_bit_is_the_same_in_any_company(name, tmp_path):
    folder = save_model(FAMILIES[name], tmp_path)
    runner = make_runner(folder, deterministic=True, max_num_batched_tokens=48)
    assert isinstance(runner.model, NativeDecoder)
    assert generate(runner, requests_of()).tokens == Oracle(folder).alone()


@pytest.mark.parametrize("name", KINDS)
def test_the_fast_path_reads_only_states_that_a_step_has_written(name, tmp_path, monkeypatch):
    """Where the argmax is computed in the step, and where tokens are drawn from logits."""
    runner = make_runner(save_model(FAMILIES[name], tmp_path), model_path="fast")
    monkeypatch.setattr(StateTags, "commit", lambda self, turn: None)
    for sampling in ({}, {"temperature": 1.0}):
        with pytest.raises(DeviceFailed, match="has no recurrent state after"):
            generate(runner, requests_of(**sampling))
