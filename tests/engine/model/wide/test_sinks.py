"""Attention sinks: which models are served exactly, and that a lost sink is noticed."""

import dataclasses

import pytest
import torch
import transformers

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.kernels.build import best_variant
from engine.model.load.fast_path import WrongLogits, check_against
from engine.model.wide import transformers_model
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    _GROUPED,
    PROMPTS,
    Oracle,
    check_generated,
    generate,
    make_runner,
    requests_of,
    save_model,
)
from tests.engine.model.decoders import FAMILIES, run_steps

MODELS = {
    # Sinks in every layer; the first layer has no window and no rotary positions.
    "granite_swa": transformers.GraniteSWAConfig(
        **_GROUPED, sliding_window=13, layer_rope_theta=[0, 10000.0], attention_multiplier=0.25
    ),
    "granitemoe_swa": transformers.GraniteMoeSWAConfig(
        **_GROUPED,
        sliding_window=13,
        attention_multiplier=0.25,
        num_local_experts=4,
        shared_intermediate_size=32,
    ),
    # Sinks in the layer with a window only, which also has twice the key heads.
    "mimo_v2_flash": transformers.MiMoV2FlashConfig(
        **_GROUPED,
        head_dim=24,
        v_head_dim=16,
        sliding_window=13,
        layer_types=["full_attention", "sliding_attention"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "flint": transformers.FlintConfig(
        **(_GROUPED | {"num_hidden_layers": 3}),
        head_dim=16,
        sliding_window=13,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_family_with_sinks_gives_the_tokens_of_transformers(name, tmp_path):
    folder = save_model(MODELS[name], tmp_path)
    check_generated(make_runner(folder, model_path="wide"), Oracle(folder).alone())


@pytest.fixture
def without_sinks(monkeypatch):
    """A wide path that drops the sinks, which is what it did before they were served."""
    attend = transformers_model._PagedStep.attend

    def dropping(self, module, query, key, value, mask, options):
        left = {name: value for name, value in options.items() if name != "s_aux"}
        return attend(self, module, query, key, value, mask, left)

    monkeypatch.setattr(transformers_model._PagedStep, "attend", dropping)


def test_a_model_whose_sinks_are_dropped_is_refused(model_folder, without_sinks):
    loaded = load_model(model_folder("gpt_oss"))
    with pytest.raises(ModelRefused, match="has other logits with paged attention"):
        probe(loaded.model, max_model_len=256)


def test_tokens_differ_if_sinks_are_dropped(model_folder, request):
    folder = model_folder("gpt_oss")
    runner = make_runner(folder, model_path="wide")
    request.getfixturevalue("without_sinks")
    assert generate(runner, requests_of()).tokens != Oracle(folder).alone()


def test_a_form_of_the_fast_path_that_drops_sinks_is_left_out(tmp_path):
    wide, config, weights = described(tmp_path)
    variant = best_variant()
    check_against(wide, NativeDecoder(config, weights, variant=variant), block_size=16)
    layers = tuple(dataclasses.replace(layer, sinks=None) for layer in weights.layers)
    broken = dataclasses.replace(weights, layers=layers)
    with pytest.raises(WrongLogits, match="is off by"):
        check_against(wide, NativeDecoder(config, broken, variant=variant), block_size=16)


@pytest.mark.parametrize("sink", [-1000.0, 1000.0])
def test_sinks_far_from_all_scores_give_finite_logits(sink, tmp_path):
    """One has no weight, and the other all of it, although its weight is beyond float32."""
    wide, config, weights = described(tmp_path, sink=sink)
    forms = (wide, Decoder(config, weights), NativeDecoder(config, weights, variant=best_variant()))
    expected, *found = (
        torch.cat(run_steps(form, PROMPTS, [[3, 17, 30, 0], [0, 0, 10, 29]], dtype=torch.float32))
        for form in forms
    )
    assert expected.isfinite().all()
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def described(folder, *, sink: float | None = None):
    """A Granite with sinks on the wide path, and its config and weights for the fast path."""
    loaded = load_model(save_model(FAMILIES["granite_swa"], folder))
    if sink is not None:
        for layer in loaded.model.model.layers:
            layer.self_attn.sinks.fill_(sink)
    wide = probe(loaded.model, max_model_len=256)
    config = read_config(wide)
    return wide, config, read_weights(config, loaded.model.state_dict())


def test_the_probe_finds_which_layers_have_sinks(model_folder, tmp_path):
    def found(folder):
        served = probe(load_model(folder).model, max_model_len=256)
        return [layer.has_sinks for layer in served.layers], served.attention_needs.has_sinks

    assert found(model_folder("gpt_oss")) == ([True, True], True)
    assert found(save_model(MODELS["mimo_v2_flash"], tmp_path)) == ([False, True], True)
    assert found(model_folder("llama")) == ([False, False], False)


def test_sinks_of_another_shape_are_refused(model_folder):
    """One for each token and head, as a projection of the hidden states would give."""
    loaded = load_model(model_folder("gpt_oss"))
    loaded.model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.ones(4, 7))
    with pytest.raises(ModelRefused, match=r"has sinks of the shape \[4, 7\]; only one sink for"):
        probe(loaded.model, max_model_len=256)
