"""A GGUF file gives the tokens of its dequantized weights, or is refused with a reason."""

import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelRefused
from engine.model.wide import gguf_loader
from engine.model.wide.gguf_blocks import KINDS
from engine.model.wide.gguf_families import FAMILIES
from engine.model.wide.gguf_rotary import divisors
from engine.model.wide.loader import load_model
from tests.engine.model.builders import generate, make_runner, requests_of
from tests.engine.model.gguf_files import (
    CONFIGS,
    END,
    LLAMA3,
    TOKENS,
    architecture_of,
    load_dequantized,
    tiny_model,
    write_gguf,
)

PROMPTS = [
    [3 + (salt * 37 + index * (13 + salt)) % (len(TOKENS) - 3) for index in range(length)]
    for salt, length in enumerate((3, 17, 40))
]
NUM_TOKENS = 10

SERVED = [
    ("llama", Type.F32),
    ("llama", Type.F16),
    ("llama", Type.Q8_0),
    ("llama", Type.Q5_0),
    ("llama", Type.Q4_1),
    ("llama tied", Type.Q4_0),
    ("llama scaled", Type.Q8_0),
    ("qwen2", Type.Q5_1),
    ("qwen3", Type.BF16),
    ("smollm3", Type.Q8_0),
    ("granite", Type.Q4_0),
    ("qwen3moe", Type.Q8_0),
    ("gpt_oss", Type.MXFP4),
    ("gpt_oss", Type.Q8_0),
    ("phi3", Type.Q5_0),
    ("gemma2", Type.Q8_0),
    ("gemma3", Type.Q4_K),
    ("gemma3", Type.Q6_K),
]
#: The fast path has no shared experts.
SERVED_WIDE = [("llama", Type.Q8_0), ("qwen2moe", Type.Q8_0)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama as Q8_0; tests copy the file."""
    return write_gguf(
        tiny_model("llama"), tmp_path_factory.mktemp("tiny") / "m.gguf", kind=Type.Q8_0
    )


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        *((name, kind, "fast") for name, kind in SERVED),
        *((name, kind, "wide") for name, kind in SERVED_WIDE),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_the_tokens_are_those_of_generate_with_the_dequantized_weights(name, kind, path, tmp_path):
    model = tiny_model(name)
    file = write_gguf(model, tmp_path / "tiny.gguf", kind=kind)
    expected = {str(index): greedy(model, prompt) for index, prompt in enumerate(PROMPTS)}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    runner = make_runner(file, model_path=path)
    assert generate(runner, requests_of(PROMPTS, max_tokens=NUM_TOKENS)).tokens == expected
    assert runner.config_facts.tokenizer_source == file
    fingerprint = runner.config_facts.fingerprint
    assert f"-{'decoder' if path == 'fast' else 'transformers'}" in fingerprint
    assert ("-int8x3-" in fingerprint) == (path == "fast" and kind.name in KINDS)


def test_weights_are_those_of_the_dequantized_blocks_bit_for_bit(tmp_path):
    model = tiny_model("llama")
    loaded = load_dequantized(write_gguf(model, tmp_path / "m.gguf", kind=Type.Q4_1))
    expected = model.state_dict()
    for name, values in loaded.model.state_dict().items():
        assert torch.equal(values, expected[name]), name


#: What transformers does not read from a file. It assumes what the published models have.
NOT_READ = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "phi3": ("original_max_position_embeddings", "sliding_window"),
}


@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"])
def test_config_and_weights_are_those_that_transformers_reads(name, tmp_path):
    """Two readings of one file; transformers reads neither scaled frequencies nor experts."""
    more = {"tokenizer.ggml.padding_token_id": 0}
    file = write_gguf(tiny_model(name), tmp_path / "m.gguf", kind=Type.Q8_0, more=more)
    model = load_dequantized(file).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    expected = theirs.state_dict()
    assert expected.keys() == model.state_dict().keys()
    for key, values in model.state_dict().items():
        assert torch.equal(values, expected[key]), key
    kept, read = model.config.to_dict(), theirs.config.to_dict()
    differing = {key for key in kept.keys() | read.keys() if kept.get(key) != read.get(key)}
    # The origin, and a size that transformers computes from others if it is not stated.
    origin = {"_name_or_path", "_model_name_or_path", "quantization_config"}
    assert differing <= {*origin, "head_dim", "pad_token_id", *NOT_READ.get(name, ())}
    assert kept["head_dim"] == theirs.model.layers[0].self_attn.head_dim


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        (Type.F32, "auto", torch.float32),
        (Type.F16, "auto", torch.float16),
        (Type.BF16, "auto", torch.bfloat16),
        (Type.Q8_0, "auto", torch.float32),
        (Type.Q8_0, "bfloat16", torch.bfloat16),
        (Type.F16, "float32", torch.float32),
    ],
)
def test_the_data_type_is_the_chosen_one_or_that_of_the_file(kind, dtype, expected, tmp_path):
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", kind=kind)
    loaded = load_model(file, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}
    assert loaded.dtype == expected


def test_length_and_all_end_tokens_come_from_the_metadata(tmp_path):
    more = {"tokenizer.ggml.eot_token_id": 0, "llama.context_length": 96}
    loaded = load_model(write_gguf(tiny_model("llama"), tmp_path / "m.gguf", more=more))
    assert loaded.eos_token_ids == {END, 0}
    assert loaded.max_model_len == 96


@pytest.mark.parametrize(
    ("theta", "factor", "head_dim"), [(500000.0, 8.0, 128), (500000.0, 32.0, 64), (1e4, 8.0, 16)]
)
def test_scaled_frequencies_are_those_of_transformers(theta, factor, head_dim):
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters=LLAMA3 | {"rope_theta": theta, "factor": factor},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    found = divisors(theta=theta, head_dim=head_dim, factor=factor)
    assert found.min() == 1.0
    assert found.max() == factor
    np.testing.assert_allclose(plain / found, scaled.numpy(), rtol=1e-5)


def test_scaled_frequencies_reach_the_model(tmp_path):
    model = tiny_model("llama scaled")
    loaded = load_model(write_gguf(model, tmp_path / "m.gguf"))
    found, expected = (one.model.rotary_emb.inv_freq for one in (loaded.model, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert loaded.model.config.rope_parameters["factor"] == 8.0


def test_nothing_beside_the_file_changes_what_is_read(tiny, tmp_path):
    copy = Path(shutil.copy(tiny, tmp_path / "other-name.gguf"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "adapter_config.json").write_text("{")
    loaded = load_model(copy)
    assert loaded.eos_token_ids == {END}
    assert loaded.fingerprint == load_model(tiny).fingerprint


def test_the_fingerprint_is_of_the_content_and_of_the_dequantized_form(tmp_path):
    model = tiny_model("llama")
    files = [
        write_gguf(model, tmp_path / f"{kind.name}.gguf", kind=kind)
        # From coarse to fine the weights stay what Q4_0 made of them, but the files differ.
        for kind in (Type.Q4_0, Type.Q8_0, Type.F32)
    ]
    prints = {load_model(file, dtype="float32").fingerprint for file in files}
    prints.add(load_model(files[0], dtype="bfloat16").fingerprint)
    other = tmp_path / "one-byte.gguf"
    content = bytearray(files[0].read_bytes())
    content[-40] ^= 1
    other.write_bytes(content)
    prints.add(load_model(other, dtype="float32").fingerprint)
    assert len(prints) == 5


REFUSED = {
    "an unknown architecture": (
        {"architecture": "mamba"},
        "architecture 'mamba'; GGUF files are served of llama, smollm3, granite, qwen2",
    ),
    "an adapter": ({"more": {"general.type": "adapter"}}, "its general.type is 'adapter'"),
    "frequencies of an unknown formula": (
        {"extra_tensors": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
        "does not come from the scaling of Llama 3",
    ),
    "too many frequencies": (
        {"extra_tensors": {"rope_freqs.weight": np.ones(9, np.float32)}},
        "does not come from the scaling of Llama 3",
    ),
    "frequencies in another type": (
        {"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float16)}},
        "is not a vector in float32",
    ),
    "a scaled context": (
        {"more": {"llama.rope.scaling.type": "yarn"}},
        "sets llama.rope.scaling.type to 'yarn'",
    ),
    "experts": ({"more": {"llama.expert_count": 8}}, "sets llama.expert_count to 8"),
    "a value for each layer": (
        {"more": {"llama.attention.head_count_kv": [2, 1]}},
        "a value for each layer in llama.attention.head_count_kv",
    ),
    "rotation of a part of each head": (
        {"more": {"llama.attention.key_length": 32}},
        "sets llama.attention.key_length to 32",
    ),
    "no number of heads": (
        {"without": ("llama.attention.head_count",)},
        "has no llama.attention.head_count",
    ),
    "a lost tensor": (
        {"without": ("blk.1.ffn_up.weight",)},
        "lacks the tensor blk.1.ffn_up.weight",
    ),
    "layers without end": (
        {"more": {"llama.block_count": (1 << 31) - 1}},
        "lacks the tensor blk.2.attn_norm.weight",
    ),
    "a number of heads that no size fits": (
        {"more": {"llama.attention.head_count": (1 << 31) - 1}},
        "The hidden size (64) is not a multiple of the number of attention heads",
    ),
    "another number of heads than the tensors have": (
        {"more": {"llama.attention.head_count": 32}},
        "stores blk.0.attn_q.weight with the shape (64, 64)",
    ),
    "a biased projection": (
        {"extra_tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}},
        "has the tensor blk.0.attn_q.bias",
    ),
    "integers": (
        {"without": ("output_norm.weight",), "extra_tensors": {
            "output_norm.weight": np.ones(64, np.int32)}},
        "stores output_norm.weight in the type I32",
    ),
}  # fmt: skip


REFUSED_GEMMA3 = {
    "no window": (
        {"without": ("gemma3.attention.sliding_window",)},
        "has no gemma3.attention.sliding_window",
    ),
    "another base of the layers with a window": (
        {"more": {"gemma3.rope.freq_base_swa": 20000.0}},
        "sets gemma3.rope.freq_base_swa to 20000.0, and transformers assumes 10000.0",
    ),
    "a scaled context": (
        {"more": {"gemma3.rope.scaling.type": "linear"}},
        "sets gemma3.rope.scaling.type to 'linear'",
    ),
    "smaller heads, which are scaled otherwise": (
        {"more": {"gemma3.attention.key_length": 64, "gemma3.attention.value_length": 64}},
        "scales the scores of every such file for heads of 256",
    ),
}


@pytest.mark.parametrize("case", REFUSED_GEMMA3)
def test_a_gemma_3_that_would_be_computed_otherwise_is_refused(case, tmp_path):
    changes, expected = REFUSED_GEMMA3[case]
    file = write_gguf(tiny_model("gemma3"), tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelRefused, match=re.escape(expected)):
        load_model(file)


@pytest.mark.parametrize(("stated", "expected"), [(0, None), (13, 13)])
def test_a_window_of_0_is_none(stated, expected, tmp_path):
    more = {"phi3.attention.sliding_window": stated}
    loaded = load_model(write_gguf(tiny_model("phi3"), tmp_path / "m.gguf", more=more))
    assert loaded.model.config.sliding_window == expected


def test_a_gemma_2_that_would_be_computed_otherwise_is_refused(tmp_path):
    more = {"gemma2.attention.key_length": 128, "gemma2.attention.value_length": 128}
    file = write_gguf(tiny_model("gemma2"), tmp_path / "m.gguf", more=more)
    with pytest.raises(ModelRefused, match="scales the scores of every such file for heads of 256"):
        load_model(file)


def test_a_gemma_3_may_state_the_base_that_is_assumed(tmp_path):
    model = tiny_model("gemma3")
    more = {"gemma3.rope.freq_base_swa": 10000.0}
    loaded = load_model(write_gguf(model, tmp_path / "m.gguf", more=more))
    kinds = loaded.model.config.layer_types
    assert kinds == [*["sliding_attention"] * 5, "full_attention"]
    assert loaded.model.config.sliding_window == 13


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_to_be_read_correctly_is_refused_by_name(case, tmp_path):
    changes, expected = REFUSED[case]
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelRefused) as caught:
        load_model(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_type_that_the_library_cannot_dequantize_is_refused_by_name(tiny, tmp_path):
    content = tiny.read_bytes()
    name = b"blk.0.attn_q.weight"
    # After the name: the number of dimensions, two dimensions, the type.
    at = content.index(name) + len(name) + 4 + 2 * 8
    file = tmp_path / "m.gguf"
    for number, expected in ((int(Type.Q8_K), "type Q8_K, which gguf"), (99, "type number 99")):
        file.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])
        with pytest.raises(ModelRefused, match=expected):
            load_model(file)


def test_without_the_libraries_the_extra_is_named(tiny, monkeypatch):
    monkeypatch.setattr(gguf_loader, "LIBRARY", "not_installed_here")
    with pytest.raises(ModelRefused, match=r"not_installed_here is missing.*extra `gguf`"):
        load_model(tiny)


def test_the_path_says_what_is_missing(tiny, tmp_path):
    with pytest.raises(ModelRefused, match="there is no file"):
        load_model(str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelRefused, match=r"there is no file owner/missing\.gguf in"):
        load_model("owner/missing.gguf")
    with pytest.raises(ModelRefused, match=r"has no config.json; .* name the file: .*m\.gguf"):
        load_model(tiny.parent)


def test_each_family_that_is_served_is_tested():
    names = {name for name, _ in (*SERVED, *SERVED_WIDE)}
    assert {architecture_of(CONFIGS[name]) for name in names} == set(FAMILIES)
