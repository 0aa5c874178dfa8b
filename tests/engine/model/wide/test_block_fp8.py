"""FP8 weights in blocks: served with the tokens of the dequantized model, or refused."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from engine.errors import ModelRefused
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.wide import block_fp8
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    _GROUPED,
    CONFIGS,
    Oracle,
    check_generated,
    generate,
    make_runner,
    requests_of,
    save_model,
)
from tests.engine.model.wide.quantized import FP8, note
from tests.engine.model.wide.wrappers import WRAPPERS

BLOCK = [16, 16]
NOTE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": BLOCK,
    "modules_to_not_convert": ["lm_head"],
}

MODELS = {
    "llama": CONFIGS["llama"],
    "qwen3": CONFIGS["qwen3"],
    "deepseek": CONFIGS["deepseek"],
    # The experts' weights are stored one by one, and stacked after they are dequantized.
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **_GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored values and the scale of each block; 448 is the largest value of the type."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    weight = weight.float()
    stored, scales = torch.empty_like(weight, dtype=FP8), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            where = (
                slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
            )
            scales[row, column] = weight[where].abs().max() / 448
            stored[where] = (weight[where] / scales[row, column]).to(FP8)
    return stored, scales


def save_fp8(config, folder, *, stored=torch.float32, **fields):
    """A model with quantized projections, and a note in config.json."""
    wrappers = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    save_model(config, folder, model_class=wrappers.get(type(config), None))
    note(folder, dtype=str(stored).removeprefix("torch."))
    weights = {
        name: tensor.to(stored) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name], weights[f"{name}_scale_inv"] = quantize(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return note(folder, quantization_config=NOTE | fields)


def dequantized(folder, target):
    """The same model with plain weights, computed by the definition."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    for name in [name for name in weights if name.endswith("_scale_inv")]:
        scales = weights.pop(name)
        for dim, block in enumerate(BLOCK):
            scales = scales.repeat_interleave(block, dim=dim)
        weight = name.removesuffix("_scale_inv")
        rows, columns = weights[weight].shape
        weights[weight] = weights[weight].float() * scales[:rows, :columns]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_the_dequantized_model(name, tmp_path):
    folder = save_fp8(MODELS[name], tmp_path / "fp8")
    runner = make_runner(folder)
    assert isinstance(runner.model, NativeDecoder) == (name != "deepseek")
    check_generated(runner, Oracle(dequantized(folder, tmp_path / "plain")).alone())


@pytest.mark.parametrize(
    ("name", "stored", "dtype"),
    [
        ("qwen3_moe", torch.float32, "bfloat16"),
        ("deepseek", torch.bfloat16, "float32"),
        ("mistral3", torch.float32, "auto"),
        ("qwen2_5_vl", torch.bfloat16, "auto"),
        ("qwen3_vl", torch.float32, "float32"),
        ("qwen3_vl_moe", torch.bfloat16, "bfloat16"),
    ],
    ids=str,
)
def test_every_weight_is_its_stored_value_times_its_scale(name, dtype, stored, tmp_path):
    """Also where other weights are stored in another type than the one to compute in."""
    folder = save_fp8((WRAPPERS | MODELS)[name], tmp_path / "fp8", stored=stored)
    found = load_model(folder, dtype=dtype).model
    expected = load_model(dequantized(folder, tmp_path / "plain"), dtype=dtype).model.state_dict()
    assert found.dtype == (stored if dtype == "auto" else getattr(torch, dtype))
    assert found.state_dict().keys() == expected.keys()
    for tensor, value in found.state_dict().items():
        assert value.dtype == expected[tensor].dtype, tensor
        assert torch.equal(value, expected[tensor]), tensor


def test_tokens_differ_if_scales_are_lost(tmp_path, monkeypatch):
    folder = save_fp8(MODELS["llama"], tmp_path)
    right = generate(make_runner(folder), requests_of()).tokens
    monkeypatch.setattr(
        Fp8Dequantize, "_dequantize_one", lambda self, stored, scales, output_dtype: stored.float()
    )
    assert generate(make_runner(folder), requests_of()).tokens != right


def change(folder, **tensors):
    """Replace tensors; None removes one, and `__` in a name stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


UP = "model__layers__0__mlp__up_proj__weight"
SCALE = f"{UP}_scale_inv"
REFUSED_TENSORS = {
    "no scales": ({SCALE: None}, "up_proj.weight as F8_E4M3, and the checkpoint has no"),
    "scales of bytes": ({SCALE: torch.ones(6, 4, dtype=torch.uint8)}, "of floats: download it"),
    "too few scales": ({SCALE: torch.ones(1, 4)}, r"scales \[1, 4\], which transformers cannot"),
    "one scale for all": ({SCALE: torch.ones(1)}, r"with scales \[1\], which transformers cannot"),
    "scales of a plain weight": (
        {UP: torch.ones(96, 64)},
        r"has \S+up_proj\.weight_scale_inv, which belongs to quantized weights",
    ),
    "scales of inputs": (
        {"model__layers__0__mlp__up_proj__input_scale": torch.ones(1)},
        r"has \S+up_proj\.input_scale, which belongs to quantized weights",
    ),
    "other integers": (
        {"model__norm__weight": torch.ones(64, dtype=torch.int8)},
        r"stores model\.norm\.weight as I8, which is no plain float",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_TENSORS)
def test_weights_whose_scales_do_not_fit_are_refused(kind, tmp_path):
    tensors, expected = REFUSED_TENSORS[kind]
    folder = change(save_fp8(MODELS["llama"], tmp_path), **tensors)
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


def test_a_smaller_last_block_is_refused_because_transformers_would_divide_it_wrongly(tmp_path):
    """24 columns in blocks of 16 have two scales; transformers would take 12 columns for each."""
    sizes = _GROUPED | {"intermediate_size": 24}
    folder = save_fp8(transformers.LlamaConfig(**sizes), tmp_path / "fp8")
    expected = r"down_proj\.weight \[64, 24\] in blocks of \[16, 16\] with scales \[4, 2\], which"
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    found = Fp8Dequantize(None)._dequantize_one(weights[name], weights[f"{name}_scale_inv"])
    plain = load_file(dequantized(folder, tmp_path / "plain") / "model.safetensors")[name]
    assert not torch.allclose(found, plain)


def test_other_fields_and_values_that_mean_the_same_are_served(tmp_path):
    """The first one is in checkpoints whose scales are powers of two."""
    load_model(save_fp8(MODELS["llama"], tmp_path, scale_fmt="ue8m0", ignored_layers=["lm_head"]))


@pytest.mark.parametrize(
    ("size", "block", "count", "fits"),
    [
        (64, 32, 2, True),
        (20, 32, 1, True),
        (48, 32, 2, False),
        (64, 32, 1, False),
        (64, 32, 4, False),
        (64, 32, 0, False),
        (0, 32, 0, False),
    ],
)
def test_which_numbers_of_scales_fit(size, block, count, fits):
    assert block_fp8._divides(size, block, count) == fits


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"activation_scheme": "static"},
        {"activation_scheme": None},
        {"fmt": "e5m2"},
        {"expert_dtype": "fp4"},
        {"new_field": 1},
    ],
    ids=str,
)
def test_a_note_that_means_something_else_is_refused(fields, tmp_path):
    folder = save_fp8(MODELS["llama"], tmp_path, **fields)
    expected = r"^config\.json describes quantized weights \(quantization_config: fp8\): use the "
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


def test_a_second_note_is_refused(tmp_path):
    folder = note(save_fp8(MODELS["llama"], tmp_path), text_config={"quantization_config": NOTE})
    with pytest.raises(ModelRefused, match=r"\(text_config\.quantization_config: fp8\)"):
        load_model(folder)


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(block_fp8, "LIBRARY", "not_installed_here")
    with pytest.raises(ModelRefused, match=r"not_installed_here is missing.*extra `fp8`"):
        load_model(save_fp8(MODELS["llama"], tmp_path))
