"""Weights of compressed-tensors: the values of their definition, on each path, or refused."""

import math
import re

import pytest
import torch
import transformers

from engine.errors import ModelRefused
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.wide import quantized_weights
from engine.model.wide.compressed_tensors import compressed_tensors
from engine.model.wide.loader import load_model
from engine.model.wide.scaled_numbers import ScaledIntegers, Unfit
from tests.engine.model.builders import _GROUPED, CONFIGS, Oracle, check_generated, make_runner
from tests.engine.model.wide.packed import (
    change,
    floats,
    integers,
    packed,
    plain_of,
    save_packed,
    shuffled,
    spread,
    weights_of,
)
from tests.engine.model.wide.wrappers import WRAPPERS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def described(weights=None, *, form="pack-quantized", **fields):
    """A note as such checkpoints have it."""
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 32,
            "block_structure": None,
            "dynamic": False,
            "actorder": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        | (weights or {}),
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "version": "0.9.1",
    } | fields


def can_be_kept(numbers):
    return isinstance(numbers, ScaledIntegers) and numbers.can_be_kept


CHANNEL = {"strategy": "channel", "group_size": None}
ASYMMETRIC = {"symmetric": False}
INT8 = {"num_bits": 8, **CHANNEL}
FP8 = {"num_bits": 8, "type": "float", **CHANNEL}
#: How a weight is packed, the fields of its group, and the bits in which it is kept.
VALUES = {
    "W4A16, groups of 32": (packed(), {}, 4),
    "W4A16, groups of 128": (packed(size=128), {"group_size": 128}, 4),
    "W4A16, float16 scales": (packed(dtype=F16), {}, 4),
    "W4A16, zero points": (packed(is_symmetric=False), ASYMMETRIC, 5),
    "W4A16, channels": (packed(size=-1), CHANNEL, 4),
    "W4A16, channels, zero points": (packed(size=-1, is_symmetric=False), CHANNEL | ASYMMETRIC, 5),
    "W4A16, unordered groups": (packed(order=shuffled), {"actorder": "group"}, None),
    "W4A16, groups of 16": (packed(size=16), {"group_size": 16}, None),
    "W4A16, float32 scales": (packed(dtype=F32), {}, None),
    "W8A16, groups of 64": (packed(8, 64), {"num_bits": 8, "group_size": 64}, 8),
    "W8A16, channels": (packed(8, -1), INT8, 8),
    "W8A8": (integers(), INT8, 8),
    "W8A8, flat scales": (integers(shape=-1), INT8, 8),
    "W8A8, zero points": (integers(is_symmetric=False), INT8 | ASYMMETRIC, None),
    "FP8, channels": (floats(), FP8, None),
    "FP8, flat scales": (floats(is_flat=True), FP8, None),
    "FP8, tensors": (floats((-1, -1), dtype=F32), FP8 | {"strategy": "tensor"}, None),
    "FP8, a scalar": (floats((-1, -1), is_flat=True), FP8 | {"strategy": "tensor"}, None),
    "FP8, blocks with rests": (
        floats((32, 48)),
        FP8 | {"strategy": "block", "block_structure": [32, 48]},
        None,
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_weight_has_the_values_of_its_definition_and_is_kept_only_with_them(kind):
    packer, weights, bits = VALUES[kind]
    parts, values = packer(spread((72, 256)))
    found = compressed_tensors(described(weights)).unpack(parts)
    assert torch.equal(found.dequantized(), values)
    assert (found.unpacked().bits if can_be_kept(found) else None) == bits
    if bits:
        assert torch.equal(found.unpacked().dequantized(), values)
        assert torch.equal(found.rows(slice(3, 5)), values[3:5])


def test_the_last_words_of_a_row_may_have_fewer_numbers():
    parts, values = packed(size=-1)(spread((72, 20)))
    assert parts["weight_packed"].shape == (72, 3)
    found = compressed_tensors(described(CHANNEL)).unpack(parts)
    assert torch.equal(found.dequantized(), values)


def test_each_weight_has_the_group_of_the_note_that_its_tensors_fit():
    groups = {
        str(i): {"weights": {"num_bits": 8, "group_size": size}} for i, size in enumerate((64, 128))
    }
    groups["four"] = {"weights": {"num_bits": 4, "group_size": 32}, "format": "pack-quantized"}
    groups["attention"] = {"targets": ["LlamaAttention"], "weights": None}
    form = compressed_tensors(described(form="mixed-precision", config_groups=groups))
    for packer in (packed(8, 64), packed(8, 128), packed(4, 32)):
        parts, values = packer(spread((16, 256)))
        assert torch.equal(form.unpack(parts).dequantized(), values)
    with pytest.raises(
        Unfit, match=r"no group of quantization_config describes a weight \[16, 256\]"
    ):
        form.unpack(packed(4, 64)(spread((16, 256)))[0])


@pytest.mark.parametrize("kind", ["W4A16, zero points", "FP8, channels"])
def test_the_tokens_are_those_of_the_dequantized_model(kind, tmp_path):
    packer, weights, bits = VALUES[kind]
    name = "qwen3" if bits else "llama"
    folder = save_packed(CONFIGS[name], tmp_path / "m", packer, described(weights))
    runner = make_runner(folder)
    assert isinstance(runner.model, NativeDecoder)
    assert runner.model.name.endswith("-int8x3") == (bits is not None)
    check_generated(runner, Oracle(plain_of(folder)).alone())


@pytest.mark.parametrize("tried", [False, True])
def test_experts_are_dequantized_and_stacked(tried, tmp_path, monkeypatch):
    """Also where names do not tell that transformers will copy them."""
    if tried:
        monkeypatch.setattr(quantized_weights, "EXPERT", re.compile("nothing"))
    config = transformers.Qwen3MoeConfig(
        **_GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    folder = save_packed(config, tmp_path / "m", packed(), described())
    loaded, expected = load_model(folder), load_model(plain_of(folder)).model.state_dict()
    assert len(loaded.stored) == 2 * 4
    for name, value in weights_of(loaded).items():
        assert torch.equal(value, expected[name]), name


def test_weights_that_transformers_renames_are_kept_and_those_of_the_tower_are_left_out(tmp_path):
    folder = save_packed(WRAPPERS["mistral3"], tmp_path / "m", packed(), described())
    loaded, plain = load_model(folder), load_model(plain_of(folder)).model.state_dict()
    assert loaded.stored.keys() == {name for name in plain if name.endswith("_proj.weight")}
    for name, value in weights_of(loaded).items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [("bfloat16", "auto", BF16), ("float16", "auto", F32), ("float16", "float16", F16)],
)
def test_weights_are_rounded_once_into_the_chosen_type(stored, dtype, expected, tmp_path):
    """No form of the fast path computes in float16 on a CPU, so `auto` is float32 there."""
    folder = save_packed(
        CONFIGS["llama"], tmp_path / "m", packed(dtype=F16), described(), dtype=stored
    )
    loaded = load_model(folder, dtype=dtype)
    plain = load_model(plain_of(folder), dtype=str(expected).removeprefix("torch."))
    assert loaded.dtype == expected
    for name, value in weights_of(loaded).items():
        assert value.dtype == expected
        assert torch.equal(value, plain.model.state_dict()[name]), name


def test_the_end_tokens_of_the_generation_config_are_read(tmp_path):
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", packed(), described())
    transformers.GenerationConfig(eos_token_id=[7, 8]).save_pretrained(folder)
    assert load_model(folder).eos_token_ids == load_model(plain_of(folder)).eos_token_ids | {7, 8}


def test_scales_of_activations_and_caches_change_nothing(tmp_path):
    """Inputs of products and KV are not rounded."""
    group = described(INT8)["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "dynamic": False, "type": "int"}
    fields = {"config_groups": {"group_0": group}, "kv_cache_scheme": {"num_bits": 8}}
    folder = save_packed(
        CONFIGS["llama"], tmp_path / "m", integers(), described(form="int-quantized", **fields)
    )
    before = weights_of(load_model(folder))
    layer = "model__layers__0__self_attn"
    change(
        folder,
        **{
            f"{layer}__q_proj__input_scale": torch.ones(1),
            f"{layer}__q_proj__input_zero_point": torch.zeros(1, dtype=torch.int8),
            f"{layer}__k_scale": torch.ones(1),
        },
    )
    for name, value in weights_of(load_model(folder)).items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(ModelRefused, match=r"has \S+k_scale, which belongs to quantized weights"):
        load_model(change(folder, {"kv_cache_scheme": None}))


def group_of(**weights):
    return {"config_groups": {"group_0": {"weights": weights}}}


REFUSED_FIELDS = {
    "format": {"format": "marlin-24"},
    "quantization_status": {"quantization_status": "calibration"},
    "sparsity_config": {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "transform_config": {"transform_config": {"config_groups": {"u": {}}}},
    "config_groups": {"config_groups": ["W4A16"]},
    "config_groups.W4A16": {"config_groups": {"W4A16": ["Linear"]}},
    "config_groups.group_0.weights": {"config_groups": {"group_0": {"weights": "int4"}}},
    "config_groups.group_0.scale": {"config_groups": {"group_0": {"scale": 2}}},
    "config_groups.group_0.format": {
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}}
    },
    "config_groups.group_0.weights.num_bits": group_of(num_bits=3),
    "config_groups.group_0.weights.num_bits = 4.0": group_of(num_bits=4.0),
    "config_groups.group_0.weights.num_bits = 4": group_of(num_bits=4, type="float"),
    "config_groups.group_0.weights.type": group_of(type=["int"]),
    "config_groups.group_0.weights.dynamic": group_of(dynamic=True),
    "config_groups.group_0.weights.strategy": group_of(strategy="tensor_group"),
    "config_groups.group_0.weights.strategy = 'block'": group_of(strategy="block"),
    "config_groups.group_0.weights.group_size": group_of(strategy="group", group_size=0),
    "config_groups.group_0.weights.block_structure": group_of(
        type="float", strategy="block", block_structure=[0, 1]
    ),
    "config_groups.group_0.weights.rotation": group_of(rotation=True),
    "new_field": {"new_field": "x" * 1000},
}


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_a_field_that_would_change_the_weights_is_refused_by_name(field):
    with pytest.raises(ModelRefused) as refused:
        compressed_tensors(described(**REFUSED_FIELDS[field]))
    assert f"quantization_config.{field}" in str(refused.value)
    assert len(str(refused.value)) < 400


def strange(**parts):
    """A packer of a weight with other tensors; None removes one."""

    def packer(weight):
        made, _ = packed()(weight)
        made |= parts
        return {name: part for name, part in made.items() if part is not None}

    return packer


I32, I64 = torch.int32, torch.int64
#: Tensors beside those of a weight [16, 64], and what the refusal says.
UNFIT = {
    "no scales": ({"weight_scale": None}, "no weight_scale"),
    "scales of integers": (
        {"weight_scale": torch.ones(16, 2, dtype=I32)},
        "scales are torch.int32",
    ),
    "scales of three dimensions": ({"weight_scale": torch.ones(16, 2, 1)}, r"\[16, 2, 1\]"),
    "too few scales": ({"weight_scale": torch.ones(16, 1)}, r"with scales \[16, 1\]"),
    "a few rows of scales": ({"weight_scale": torch.ones(15, 2)}, r"with scales \[15, 2\]"),
    "no shape": ({"weight_shape": None}, "no weight_shape"),
    "a shape of floats": ({"weight_shape": torch.ones(2)}, "no weight_shape of two integers"),
    "a huge shape": ({"weight_shape": torch.tensor([16, 1 << 62])}, "in rows of 8 words"),
    "a negative shape": ({"weight_shape": torch.tensor([16, -64])}, r"weight_shape is \[16, -64\]"),
    "other rows": ({"weight_shape": torch.tensor([17, 64])}, "16 rows are packed"),
    "other columns": (
        {"weight_shape": torch.tensor([16, 72])},
        r"a weight \[16, 72\], in rows of 8",
    ),
    "bytes": (
        {"weight_packed": torch.ones(16, 8, dtype=torch.uint8)},
        "weight_packed is torch.uint8",
    ),
    "a stack": ({"weight_packed": torch.ones(2, 16, 8, dtype=I32)}, r"is torch.int32 \[2, 16, 8\]"),
    "a group outside": (
        {"weight_g_idx": torch.full((64,), 2, dtype=I32)},
        "groups outside of the 2",
    ),
    "a negative group": ({"weight_g_idx": torch.arange(64, dtype=I32) - 1}, "groups outside"),
    "a group of fewer inputs": ({"weight_g_idx": torch.zeros(63, dtype=I64)}, "groups outside"),
    "groups of floats": ({"weight_g_idx": torch.zeros(64)}, "weight_g_idx is torch.float32"),
    "other zero points": (
        {"weight_zero_point": torch.zeros(3, 2, dtype=I32)},
        r"weight_zero_point is torch.int32 \[3, 2\]",
    ),
    "zero points of floats": ({"weight_zero_point": torch.zeros(16, 2)}, "is torch.float32"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_do_not_fit_are_named(kind):
    parts, expected = UNFIT[kind]
    made = strange(**parts)(spread((16, 64)))
    with pytest.raises(Unfit, match=expected):
        compressed_tensors(described()).unpack(made)


def test_an_asymmetric_weight_without_zero_points_is_unfit():
    with pytest.raises(Unfit, match="no weight_zero_point"):
        compressed_tensors(described(ASYMMETRIC)).unpack(packed()(spread((16, 64)))[0])


@pytest.mark.parametrize("order", [True, "group", "dynamic"])
def test_ordered_inputs_need_the_group_of_each(order):
    weight = packed()(spread((16, 64)))[0]
    described_as = compressed_tensors(described({"actorder": order}))
    with pytest.raises(Unfit, match="no weight_g_idx"):
        described_as.unpack(weight)
    without = {"weight_g_idx": torch.full((64,), -1, dtype=I32)}
    with pytest.raises(Unfit, match="no weight_g_idx"):
        described_as.unpack(weight | without)


@pytest.mark.parametrize(("weights", "order"), [({}, "backwards"), (FP8, "group")])
def test_an_order_that_is_not_read_is_refused(weights, order):
    with pytest.raises(ModelRefused, match="actorder"):
        compressed_tensors(described(weights | {"actorder": order}))


def test_floats_are_not_described_by_a_group_of_integers():
    with pytest.raises(
        Unfit, match=r"no group of quantization_config describes a weight \[16, 64\]"
    ):
        compressed_tensors(described(INT8)).unpack(floats()(spread((16, 64)))[0])


UP = "model__layers__0__mlp__up_proj"


DAMAGED = {
    "values that are not finite": (
        {f"{UP}__weight_scale": torch.full((96, 2), math.inf)},
        r"^model\.safetensors stores the quantized weight \S+up_proj\.weight, but it has values",
    ),
    "an empty tensor": ({f"{UP}__weight_scale": torch.ones(0, 2)}, "its weight_scale is empty"),
    "scales alone": ({f"{UP}__weight_packed": None}, r"has \S+up_proj\.weight_\w+, which belongs"),
    "a part of another format": (
        {f"{UP}__codebooks": torch.ones(1)},
        r"has \S+up_proj\.codebooks, which belongs to",
    ),
    "other integers": (
        {"model__norm__weight": torch.ones(64, dtype=torch.int8)},
        r"stores model\.norm\.weight as I8, which is no plain float",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_a_weight(kind, tmp_path):
    tensors, expected = DAMAGED[kind]
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", packed(), described())
    with pytest.raises(ModelRefused, match=expected):
        load_model(change(folder, **tensors))
