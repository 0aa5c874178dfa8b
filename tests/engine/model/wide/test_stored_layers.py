"""Layers with quantized weights compute what ordinary ones compute, and take hardly any memory."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.model.wide import stored_layers
from engine.model.wide.gguf_blocks import StoredBlocks
from engine.model.wide.loader import load_model
from tests.engine.model.builders import make_runner
from tests.engine.model.gguf_files import load_dequantized, tiny_model, write_gguf

MODELS = {
    "llama": Type.Q4_1,
    "llama tied": Type.Q8_0,
    "qwen2": Type.Q5_0,
    "qwen3moe": Type.Q8_0,
    "gemma3": Type.Q4_K,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_the_logits_are_those_of_ordinary_layers(name, dtype, tmp_path, monkeypatch):
    # A weight has several slices, and none has hundreds.
    monkeypatch.setattr(stored_layers, "SLICE_ELEMENTS", 20_000 if name == "gemma3" else 700)
    file = write_gguf(tiny_model(name), tmp_path / "m.gguf", kind=MODELS[name])
    models = [load(file, dtype=dtype).model for load in (load_model, load_dequantized)]
    for model in models:
        model.set_attn_implementation("eager")
    found, expected = (model(torch.tensor([[5, 3, 5, 200, 0]])).logits for model in models)
    # Products with fewer outputs may add in another order.
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert float((found - expected).norm() / expected.norm()) < tolerance


def test_parameters_take_no_memory_until_they_are_dequantized(tmp_path):
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", kind=Type.Q4_0)
    loaded = load_model(file)
    for name in loaded.stored:
        parameter = loaded.model.get_parameter(name)
        assert parameter.untyped_storage().nbytes() == 4
        assert parameter.isnan().all()


def test_the_fast_path_never_dequantizes_a_whole_weight(tmp_path, monkeypatch):
    def whole(_):
        raise AssertionError("a whole weight is dequantized")

    file = write_gguf(tiny_model("llama tied"), tmp_path / "m.gguf", kind=Type.Q4_0)
    monkeypatch.setattr(stored_layers, "dequantized_in", whole)
    monkeypatch.setattr(
        StoredBlocks, "dequantized", lambda self: whole(self) if self.can_be_kept else _PLAIN(self)
    )
    assert "-int8x3-" in make_runner(file).config_facts.fingerprint


_PLAIN = StoredBlocks.dequantized


def test_a_scale_that_is_no_number_is_found(tmp_path):
    file = write_gguf(tiny_model("gemma3"), tmp_path / "m.gguf", kind=Type.Q6_K)
    blocks = load_model(file).stored["model.layers.0.mlp.down_proj.weight"]
    assert blocks.is_finite()
    broken = blocks.blocks.clone()
    broken[-1, 208:210] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    assert not StoredBlocks(blocks.kind, broken, blocks.shape).is_finite()
