"""A hybrid model as a GGUF file has what llama.cpp computes with, under its names."""

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.common import models
from benchmarks.common.hybrids import HYBRIDS
from benchmarks.peers import gguf_model

#: The layers of each kind, and sizes that make a model of a few kilobytes.
SIZES = {
    "hidden_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SIZES_OF = {
    "LFM2-S": {"intermediate_size": 96},
    "GRANITE4-S": {
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
    "QWEN35-S": {
        "intermediate_size": 96,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


@pytest.fixture
def written(request, tmp_path, monkeypatch):
    """Tensors and keys of the file of a small model, and its tensors in transformers."""
    name = request.param
    config_class, options = HYBRIDS[name]
    own = SIZES | SIZES_OF[name] | {"layer_types": [options["layer_types"][0], "full_attention"]}
    monkeypatch.setitem(HYBRIDS, name, (config_class, options | own))
    monkeypatch.setattr(models, "BUILD_FOLDER", tmp_path)
    folder = models.model_folder(name)
    gguf_model.convert(folder, tmp_path / "model.gguf", "bf16")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {
        one.name: gguf.dequantize(one.data, one.tensor_type).reshape(one.shape[::-1])
        for one in reader.tensors
    }
    kinds = {one.name: one.tensor_type.name for one in reader.tensors}
    keys = {name: field.contents() for name, field in reader.fields.items()}
    stored = load_file(folder / "model.safetensors")
    return tensors, kinds, keys, {name: one.float().numpy() for name, one in stored.items()}


@pytest.mark.parametrize("written", SIZES_OF, indirect=True)
def test_every_weight_is_in_the_file_and_kernels_and_vectors_are_in_float32(written):
    tensors, kinds, keys, theirs = written
    assert sum(one.size for one in tensors.values()) == sum(one.size for one in theirs.values())
    small = {name for name, values in tensors.items() if values.ndim == 1}
    small |= {name for name in tensors if "conv1d" in name or "norm" in name}
    assert {kinds[name] for name in small} == {"F32"}
    assert kinds["blk.1.attn_q.weight"] == kinds["token_embd.weight"] == "BF16"
    assert keys[f"{keys['general.architecture']}.block_count"] == 2


@pytest.mark.parametrize("written", ["LFM2-S", "GRANITE4-S"], indirect=True)
def test_a_layer_without_attention_has_no_heads_of_keys(written):
    _, _, keys, _ = written
    assert keys[f"{keys['general.architecture']}.attention.head_count_kv"] == [0, 1]


@pytest.mark.parametrize("written", ["GRANITE4-S", "QWEN35-S"], indirect=True)
def test_decays_are_stored_as_what_multiplies_the_step_size(written):
    tensors, _, _, theirs = written
    (name,) = (name for name in theirs if name.endswith("A_log"))
    assert np.allclose(tensors["blk.0.ssm_a"].ravel(), -np.exp(theirs[name]), rtol=1e-6)
    steps = np.log1p(np.exp(tensors["blk.0.ssm_dt.bias"]))
    assert (steps > 5e-4).all() and (steps < 0.2).all()


@pytest.mark.parametrize("written", ["GRANITE4-S"], indirect=True)
def test_a_projection_of_two_halves_is_stored_as_gate_and_up(written):
    tensors, _, _, theirs = written
    halves = [tensors[f"blk.1.ffn_{part}.weight"] for part in ("gate", "up")]
    whole = theirs["model.layers.1.shared_mlp.input_linear.weight"]
    assert np.array_equal(np.concatenate(halves), whole)


@pytest.mark.parametrize("written", ["QWEN35-S"], indirect=True)
def test_norms_scale_by_one_more_but_for_those_of_delta_nets(written):
    tensors, _, keys, theirs = written
    norm = "layers.0.linear_attn.norm.weight"
    assert np.array_equal(tensors["blk.0.ssm_norm.weight"], theirs[f"model.{norm}"])
    norm = "model.layers.1.self_attn.q_norm.weight"
    assert np.array_equal(tensors["blk.1.attn_q_norm.weight"], theirs[norm] + 1.0)
    # Each axis takes every third pair of the quarter of a head that is rotated.
    assert keys["qwen35.rope.dimension_sections"] == [2, 1, 1, 0]
