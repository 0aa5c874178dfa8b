"""A GGUF file with values that no converter writes is refused in a sentence, and costs little."""

import re
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelRefused
from engine.model.wide.gguf_header import read_header
from engine.model.wide.loader import load_model
from tests.engine.model.gguf_files import END, tiny_model, write_gguf

UNSOUND = [
    ("llama", "block_count", "abc"),
    ("llama", "block_count", float("nan")),
    ("llama", "block_count", True),
    ("llama", "embedding_length", -64),
    ("llama", "attention.head_count", 0),
    ("llama", "rope.freq_base", "abc"),
    ("llama", "rope.freq_base", True),
    ("llama", "attention.layer_norm_rms_epsilon", float("inf")),
    ("granite", "attention.scale", 0.0),
    ("qwen3moe", "expert_used_count", 0),
    ("gemma2", "attn_logit_softcapping", 0.0),
    ("gemma2", "final_logit_softcapping", -1.0),
]


@pytest.mark.parametrize(("name", "key", "value"), UNSOUND)
def test_a_value_of_another_type_or_range_is_refused_by_its_key(name, key, value, tmp_path):
    file = write_gguf(tiny_model(name), tmp_path / "m.gguf", more={f"{name}.{key}": value})
    with pytest.raises(ModelRefused, match=re.escape(f"is damaged: it sets {name}.{key} to")):
        load_model(file)


def test_more_experts_for_a_token_than_there_are_is_refused(tmp_path):
    more = {"qwen3moe.expert_used_count": 9}
    file = write_gguf(tiny_model("qwen3moe"), tmp_path / "m.gguf", more=more)
    with pytest.raises(ModelRefused, match="uses 9 of 8 experts"):
        load_model(file)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.1.attn_k.weight", (33, 64)),
        ("blk.1.attn_k.weight", (64,)),
        ("blk.1.ffn_down.weight", (96, 64)),
        ("blk.0.attn_norm.weight", (65,)),
        ("output_norm.weight", (1,)),
    ],
)
def test_a_tensor_of_another_shape_in_any_layer_is_refused_by_its_name(name, shape, tmp_path):
    tensors = {name: np.ones(shape, np.float32)}
    file = write_gguf(
        tiny_model("llama"), tmp_path / "m.gguf", without=(name,), extra_tensors=tensors
    )
    with pytest.raises(ModelRefused, match=re.escape(f"stores {name} with the shape")):
        load_model(file)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(4, 3, "has 4 heads, which 3 of keys cannot share"), (64, 64, "has heads of 1, which")],
)
def test_heads_that_no_model_can_have_are_refused(heads, kv_heads, expected, tmp_path):
    more = {"llama.attention.head_count": heads, "llama.attention.head_count_kv": kv_heads}
    without = ("llama.rope.dimension_count",)
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", more=more, without=without)
    with pytest.raises(ModelRefused, match=expected):
        load_model(file)


def test_a_second_name_of_a_layer_is_not_read(tmp_path):
    tensors = {"blk.00.attn_norm.weight": np.ones(64, np.float32)}
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", extra_tensors=tensors)
    with pytest.raises(ModelRefused, match=r"has the tensor blk\.00\.attn_norm\.weight"):
        load_model(file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(value, tmp_path):
    tensors = {"output_norm.weight": np.full(64, value, np.float32)}
    file = write_gguf(
        tiny_model("llama"), tmp_path / "m.gguf", without=tuple(tensors), extra_tensors=tensors
    )
    with pytest.raises(ModelRefused, match=r"model\.norm\.weight has values that are not finite"):
        load_model(file)


def test_tensors_that_share_bytes_are_refused(tmp_path):
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", kind=Type.Q8_0)
    content = bytearray(file.read_bytes())
    name = b"blk.1.attn_q.weight"
    # After the name: the number of dimensions, two dimensions, the type, the offset.
    at = content.index(name) + len(name) + 4 + 2 * 8 + 4
    other = next(one for one in read_header(file).tensors if one.name == "blk.0.attn_q.weight")
    content[at : at + 8] = struct.pack("<Q", other.offset)
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"blk\.0\.attn_q\.weight and blk\.1\.attn_q\.weight"):
        load_model(file)


@pytest.mark.parametrize("token", [-1, -1000, 1 << 40, True])
def test_an_end_token_that_the_model_does_not_have_is_none(token, tmp_path):
    more = {"tokenizer.ggml.eot_token_id": token}
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", more=more)
    assert load_model(file).eos_token_ids == {END}


def test_without_a_base_the_frequencies_have_that_of_llama_cpp(tmp_path):
    file = write_gguf(
        tiny_model("smollm3"), tmp_path / "m.gguf", without=("smollm3.rope.freq_base",)
    )
    assert load_model(file).model.config.rope_parameters["rope_theta"] == 10000.0
