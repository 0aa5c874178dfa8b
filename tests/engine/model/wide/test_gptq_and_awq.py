"""Weights of GPTQ and AWQ: the values of their definition, on each path, or refused."""

import pytest
import torch

from engine.errors import ModelRefused
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.wide.folder_weights import FORMS
from engine.model.wide.loader import load_model
from engine.model.wide.scaled_numbers import ScaledIntegers, Unfit
from tests.engine.model.builders import CONFIGS, Oracle, check_generated, make_runner
from tests.engine.model.wide.packed import (
    awq_packed,
    change,
    gptq_packed,
    plain_of,
    save_packed,
    shuffled,
    spread,
    weights_of,
)


def gptq_note(**fields):
    """A note as AutoGPTQ writes it."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "damp_percent": 0.1,
        "desc_act": False,
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
    } | fields


def awq_note(**fields):
    """A note as AutoAWQ writes it."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    } | fields


ORDERED = {"desc_act": True}
#: How a weight is packed, its note, and the bits in which it is kept.
VALUES = {
    "GPTQ, groups of 32": (gptq_packed(), gptq_note(), 4),
    "GPTQ, groups of 128": (gptq_packed(size=128), gptq_note(group_size=128), 4),
    "GPTQ, one group": (gptq_packed(size=-1), gptq_note(group_size=-1), 4),
    "GPTQ, a smaller last group": (gptq_packed(size=96), gptq_note(group_size=96), None),
    "GPTQ, asymmetric": (gptq_packed(is_symmetric=False), gptq_note(sym=False), 5),
    "GPTQ, version 2": (
        gptq_packed(is_symmetric=False, offset=0),
        gptq_note(sym=False, checkpoint_format="gptq_v2"),
        5,
    ),
    "GPTQ, 8 bits": (gptq_packed(8, 64), gptq_note(bits=8, group_size=64), 8),
    "GPTQ, bfloat16": (gptq_packed(dtype=torch.bfloat16), gptq_note(format="gptq"), 4),
    "GPTQ, ordered by activation": (gptq_packed(order=shuffled), gptq_note(**ORDERED), None),
    "GPTQ, in order after all": (gptq_packed(), gptq_note(**ORDERED), 4),
    "AWQ, groups of 32": (awq_packed(), awq_note(), 5),
    "AWQ, groups of 128": (awq_packed(128), awq_note(group_size=128), 5),
    "AWQ, other names": (
        awq_packed(),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        5,
    ),
    "AWQ, symmetric": (awq_packed(is_symmetric=True), awq_note(), 4),
}


def form_of(note):
    return FORMS[note["quant_method"]](note)


@pytest.mark.parametrize("kind", VALUES)
def test_a_weight_has_the_values_of_its_definition_and_is_kept_only_with_them(kind):
    packer, note, bits = VALUES[kind]
    parts, values = packer(spread((72, 256)))
    found = form_of(note).unpack(parts)
    assert isinstance(found, ScaledIntegers)
    assert torch.equal(found.dequantized(), values)
    assert (found.unpacked().bits if found.can_be_kept else None) == bits
    if bits:
        assert torch.equal(found.unpacked().dequantized(), values)


@pytest.mark.parametrize(
    "kind", ["GPTQ, groups of 32", "GPTQ, ordered by activation", "AWQ, groups of 32"]
)
def test_the_tokens_are_those_of_the_dequantized_model(kind, tmp_path):
    packer, note, bits = VALUES[kind]
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", packer, note)
    runner = make_runner(folder)
    assert isinstance(runner.model, NativeDecoder)
    assert runner.model.name.endswith("-int8x3") == (bits is not None)
    check_generated(runner, Oracle(plain_of(folder)).alone())


def test_inputs_keep_16_bits_in_bfloat16(tmp_path):
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", gptq_packed(), gptq_note())
    assert make_runner(folder, dtype="bfloat16").model.name.endswith("-int8x2")


def test_a_note_in_a_file_of_its_own_repeats_that_of_the_config(tmp_path):
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", gptq_packed(), gptq_note())
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    assert load_model(folder).stored
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"^hf_quant_config\.json describes quantized weights"):
        load_model(folder)


UP = "model__layers__0__mlp__up_proj"


def test_a_bias_of_zeros_changes_nothing_and_any_other_is_refused(tmp_path):
    """AutoGPTQ stores one for each weight, also where the model has none."""
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", gptq_packed(), gptq_note())
    before = weights_of(load_model(folder))
    change(folder, **{f"{UP}__bias": torch.zeros(96)})
    for name, value in weights_of(load_model(folder)).items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(ModelRefused, match=r"has \S+up_proj\.bias, which \w+ does not use"):
        load_model(change(folder, **{f"{UP}__bias": torch.eye(96)[5]}))


REFUSED_FIELDS = {
    "bits = 3": gptq_note(bits=3),
    "bits = None": {"quant_method": "gptq", "group_size": 32},
    "bits = True": gptq_note(bits=True),
    "w_bit = 8": awq_note(w_bit=8),
    "group_size = 0": gptq_note(group_size=0),
    "group_size = '32'": gptq_note(group_size="32"),
    "group_size = None": {"quant_method": "awq", "bits": 4},
    "checkpoint_format = 'marlin'": gptq_note(checkpoint_format="marlin"),
    "format = 'gptq_p'": gptq_note(format="gptq_p"),
    "pack_dtype = 'int64'": gptq_note(pack_dtype="int64"),
    "dynamic = {'.*down.*'": gptq_note(dynamic={".*down.*": {"bits": 8}}),
    "desc_act = 1": gptq_note(desc_act=1),
    "is_marlin_format = True": gptq_note(is_marlin_format=True),
    "adapter = {": gptq_note(adapter={"name": "lora"}),
    "rotation = 'hadamard'": gptq_note(rotation="hadamard"),
    "version = 'gemv'": awq_note(version="gemv"),
    "zero_point = False": awq_note(zero_point=False),
    "backend = 'llm-awq'": awq_note(backend="llm-awq"),
    "desc_act = True": awq_note(desc_act=True),
    "scaling = [1]": awq_note(scaling=[1]),
}


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_a_field_that_would_change_the_weights_is_refused_by_name(field):
    with pytest.raises(ModelRefused) as refused:
        form_of(REFUSED_FIELDS[field])
    assert f"quantization_config.{field}" in str(refused.value)


def test_modules_that_are_left_out_are_no_override():
    form_of(gptq_note(dynamic={"-:.*lm_head.*": {}}))


I32 = torch.int32
#: Tensors instead of those of a weight [16, 64], and what the refusal says.
UNFIT = {
    "no scales": ({"scales": None}, "no scales"),
    "no zero points": ({"qzeros": None}, "no qzeros"),
    "bytes": ({"qweight": torch.ones(8, 16, dtype=torch.uint8)}, "qweight is torch.uint8"),
    "a stack": ({"qweight": torch.ones(2, 8, 16, dtype=I32)}, r"int32 \[2, 8, 16\]"),
    "zero points of 64 bits": ({"qzeros": torch.ones(2, 2, dtype=torch.int64)}, "qzeros is"),
    "too few groups": ({"scales": torch.ones(1, 16)}, r"scales are \[1, 16\] and its qzeros"),
    "too many zero points": ({"qzeros": torch.ones(2, 3, dtype=I32)}, r"its qzeros \[2, 3\]"),
    "a zero point of -1": ({"qzeros": torch.full((2, 2), -1, dtype=I32)}, "zero point of -1"),
    "scales of integers": ({"scales": torch.ones(2, 16, dtype=I32)}, "scales are torch.int32"),
    "a group outside": ({"g_idx": torch.full((64,), 2, dtype=I32)}, "outside of the 2"),
    "a negative group": ({"g_idx": torch.arange(64, dtype=I32) - 1}, "outside of the 2"),
    "groups of fewer inputs": ({"g_idx": torch.zeros(63, dtype=I32)}, "outside of the 2"),
    "groups of floats": ({"g_idx": torch.zeros(64)}, "its g_idx is torch.float32"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_do_not_fit_are_named(kind):
    changes, expected = UNFIT[kind]
    parts, _ = gptq_packed()(spread((16, 64)))
    made = {name: part for name, part in (parts | changes).items() if part is not None}
    with pytest.raises(Unfit, match=expected):
        form_of(gptq_note()).unpack(made)


def test_an_order_of_inputs_must_be_stored():
    parts, values = gptq_packed()(spread((16, 64)))
    del parts["g_idx"]
    assert torch.equal(form_of(gptq_note()).unpack(parts).dequantized(), values)
    with pytest.raises(Unfit, match="no g_idx"):
        form_of(gptq_note(**ORDERED)).unpack(parts)
