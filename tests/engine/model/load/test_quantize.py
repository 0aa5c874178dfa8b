"""A model that is quantized at load has the tokens of its dequantized weights, or is refused."""

import copy
from functools import partial

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelRefused
from engine.model.load.quantize import load_quantized, quantized
from engine.model.wide.loader import load_model
from engine.model.wide.stored_layers import dequantize
from tests.engine.model.builders import Oracle, check_generated, make_runner, save_model
from tests.engine.model.decoders import FAMILIES
from tests.engine.model.gguf_files import tiny_model, write_gguf

KINDS = ("int8", "int4")


def weight_of(rows: int) -> torch.Tensor:
    """[rows, 96] of different sizes, with a group of zeros and one of equal values."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 96, generator=generator) * torch.logspace(-3, 1, rows)[:, None]
    weight[0, :32], weight[1, :32] = 0.0, 0.25
    return weight


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_is_within_half_a_step_of_its_own(kind):
    weight = weight_of(70)
    found = quantized(weight, kind)
    assert found.bits == {"int8": 8, "int4": 4}[kind]
    errors = (found.dequantized() - weight).abs().view(70, 3, 32)
    # Scales and minima are rounded to float16, and the last number may lie half a step further.
    groups = weight.view(70, 3, 32)
    largest = groups.abs().amax(dim=-1)
    steps = found.scales.float()
    span = largest / 127 if kind == "int8" else (groups.amax(dim=-1) - groups.amin(dim=-1)) / 15
    torch.testing.assert_close(steps, span, rtol=1e-3, atol=1e-6)
    assert bool((errors.amax(dim=-1) <= 0.51 * steps + 2e-3 * largest).all())
    assert not found.dequantized()[0, :32].any()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama, tied", "int8"),
        ("qwen2", "int4"),
        ("lfm2", "int8"),
        ("qwen3.5", "int8"),
        ("granite 4", "int8"),
        # Experts are not quantized, and the MLP beside them is.
        ("granite 4, experts", "int8"),
    ],
)
def test_the_tokens_are_those_of_the_dequantized_model(name, kind, tmp_path):
    config = copy.deepcopy(FAMILIES[name])
    if hasattr(config, "shared_intermediate_size"):
        config.shared_intermediate_size = 96  # Whole groups.
    folder = save_model(config, tmp_path / "m")
    runner = make_runner(folder, load=partial(load_quantized, quantization=kind))
    assert runner.model.name.endswith("-int8x3")
    plain = load_quantized(folder, dtype="float32", quantization=kind).model
    dequantize(plain)
    plain.save_pretrained(tmp_path / "plain")
    check_generated(runner, Oracle(tmp_path / "plain").alone())


def test_each_quantization_has_a_fingerprint_of_its_own(tmp_path):
    folder = save_model(FAMILIES["llama"], tmp_path / "m")
    found = [load_quantized(folder, quantization=kind) for kind in (*KINDS, None)]
    assert len({loaded.fingerprint for loaded in found}) == 3
    assert found[2].fingerprint == load_model(folder).fingerprint
    assert not found[2].stored


def test_embedding_and_head_have_8_bits(tmp_path):
    folder = save_model(FAMILIES["llama"], tmp_path / "m")
    stored = load_quantized(folder, quantization="int4").stored
    wide = {name for name, weight in stored.items() if weight.unpacked().bits == 8}
    assert wide == {"model.embed_tokens.weight", "lm_head.weight"}


def large(folder):
    """A model with a weight whose scale is no float16."""
    model = load_model(folder).model
    model.lm_head.weight[0, 0] = 1e9
    model.save_pretrained(folder)


def test_what_cannot_be_quantized_is_refused_with_a_sentence(tmp_path):
    folder = save_model(FAMILIES["llama"], tmp_path / "m")
    load = partial(load_quantized, quantization="int8")
    with pytest.raises(ModelRefused, match="int8 is computed on a CPU only"):
        load(folder, device="cuda")
    with pytest.raises(ModelRefused, match=r"compiled form .* and transformers would serve"):
        make_runner(folder, model_path="wide", load=load)
    odd = save_model(FAMILIES["llama, odd sizes"], tmp_path / "odd")
    with pytest.raises(ModelRefused, match=r"embed_tokens\.weight of .* 72 inputs, no multiple"):
        load(odd)
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", kind=Type.Q8_0)
    with pytest.raises(ModelRefused, match="is quantized already"):
        load(file)
    large(folder)
    with pytest.raises(ModelRefused, match=r"lm_head\.weight of .* beyond those of float16"):
        load(folder)
