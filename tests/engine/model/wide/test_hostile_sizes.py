"""A checkpoint that lies about sizes is refused by name, and costs little memory and time."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.model.wide.gguf_header import read_header
from tests.engine.model.builders import _GROUPED, CONFIGS, save_model
from tests.engine.model.gguf_files import tiny_model, write_gguf
from tests.engine.model.wide.bounded import MEMORY_BYTES, refusal_of, within_limits
from tests.engine.model.wide.packed import (
    awq_packed,
    change,
    floats,
    gptq_packed,
    packed,
    save_packed,
)
from tests.engine.model.wide.quantized import note
from tests.engine.model.wide.test_compressed_tensors import FP8, described
from tests.engine.model.wide.test_gguf_header import key, lying
from tests.engine.model.wide.test_gptq_and_awq import awq_note, gptq_note

WEIGHTS = "model.safetensors"
HUGE = 1 << 62


def refuses_nothing() -> None:
    pass


def fills_the_memory() -> None:
    torch.ones(2 * MEMORY_BYTES, dtype=torch.uint8)


def never_ends() -> None:
    while True:
        pass


def dies_of_something_else() -> None:
    raise KeyError("layer")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (refuses_nothing, "it was loaded"),
        (fills_the_memory, "memory"),
        (dies_of_something_else, "KeyError"),
    ],
)
def test_what_takes_more_or_is_not_refused_fails(call, expected):
    with pytest.raises(AssertionError, match=expected):
        within_limits(call)


def test_what_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr("tests.engine.model.wide.bounded.CPU_SECONDS", 1)
    with pytest.raises(AssertionError, match=r"ended by SIG(XCPU|KILL)"):
        within_limits(never_ends)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folders of models that nobody else changes, by the name of their configuration."""
    configs = CONFIGS | {
        "qwen3 moe": transformers.Qwen3MoeConfig(
            **_GROUPED,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    }

    def folder(name: str) -> Path:
        return save_model(configs[name], tmp_path_factory.mktemp("hostile") / "model")

    return folder


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


#: Fields of config.json, and what the refusal says.
FIELDS = {
    "layers": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "layers with names": ("gemma3", {"num_hidden_layers": 10**8}, "num_hidden_layers is"),
    "layers of another name": ("gpt2", {"n_layer": HUGE}, "n_layer is"),
    "experts": ("mixtral", {"num_local_experts": 10**9}, "num_local_experts is"),
    "experts in lists": ("qwen3 moe", {"num_experts": 10**7}, "num_experts is"),
    "an integer of 64 bits": ("llama", {"hidden_size": 1 << 64}, f"hidden_size is {1 << 64}"),
    "a field inside": ("llama", {"a": [{"b": 1 << 63}]}, "a.0.b is"),
    "a vocabulary": ("llama", {"vocab_size": HUGE}, f"sizes=[{HUGE}, 64]"),
    "a large vocabulary": ("llama", {"vocab_size": 1 << 25}, "embed_tokens.weight [33554432, 64]"),
    "a width": ("llama", {"hidden_size": 1 << 20}, "do not fit config.json"),
    "an inner width": ("llama", {"intermediate_size": 1 << 40}, "do not fit config.json"),
    "more layers than stored": ("llama", {"num_hidden_layers": 2000}, "do not fit config.json"),
    "heads": ("qwen3", {"head_dim": 1 << 30}, "do not fit config.json"),
    "positions": ("gpt2", {"n_positions": 1 << 40}, "wpe.weight [1099511627776, 64]"),
    "many values": ("llama", {"a": [0] * 200_000}, "is one of more than 131072 values"),
    "deep values": ("llama", {"a": nested(100)}, "nests values in more than 64 levels"),
    "very deep values": ("llama", {"a": nested(480)}, "nests values in more than 64 levels"),
    "a deep note": (
        "llama",
        {"quantization_config": {"quant_method": "gptq", "meta": nested(400)}},
        "nests values in more than 64 levels",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_config_that_asks_for_more_than_is_stored_is_refused(case, folder_of):
    name, fields, expected = FIELDS[case]
    assert expected in refusal_of(note(folder_of(name), **fields))


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 900_000, '{"a": 1' + "0" * 5000 + "}"])
def test_a_config_that_is_hard_to_parse_is_refused(text, folder_of):
    folder = folder_of("llama")
    (folder / "config.json").write_text(text)
    assert refusal_of(folder).startswith("config.json cannot be read: ")


def test_a_config_of_many_megabytes_is_not_read(folder_of):
    folder = folder_of("llama")
    with (folder / "config.json").open("wb") as stream:
        stream.truncate(8 << 30)
    assert "config.json has more than" in refusal_of(folder)


def rewritten(folder: Path, change_header) -> Path:
    """Change the JSON text of the header of a folder's weights."""
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change_header(json.loads(data[8 : 8 + size])).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    return folder


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


def with_facts(tensor: str, **facts):
    return lambda header: json.dumps(header | {tensor: header[tensor] | facts})


def with_text(tensor: str, part: str, text: str):
    """A value that would take long to make as an object."""
    mark = "the value"
    changed = with_facts(tensor, **{part: mark})
    return lambda header: changed(header).replace(json.dumps(mark), text)


HEADERS = {
    "many large dimensions": with_text(NORM, "shape", f"[{','.join([str(HUGE)] * 400_000)}]"),
    "many dimensions of one": with_text(NORM, "shape", f"[64{',1' * 100}]"),
    "a dimension of 64 bits": with_facts(NORM, shape=[1 << 64]),
    "a product of 64 bits": with_facts(NORM, shape=[1 << 32, 1 << 32]),
    "an empty tensor": with_facts(NORM, shape=[0, HUGE]),
    "a negative dimension": with_facts(NORM, shape=[-64]),
    "a dimension that is true": with_facts(NORM, shape=[True]),
    "offsets behind the file": with_facts(NORM, data_offsets=[0, HUGE]),
    "offsets of 64 bits": with_facts(NORM, data_offsets=[1 << 64, (1 << 64) + 256]),
    "offsets in reverse": with_facts(NORM, data_offsets=[512, 256]),
    "negative offsets": with_facts(NORM, data_offsets=[-256, 0]),
    "offsets that overlap": with_facts(NORM, data_offsets=[0, 256]),
    "a name twice": lambda header: (
        json.dumps(header)[:-1] + f", {json.dumps(NORM)}: {json.dumps(header[NORM])}}}"
    ),
    "a deep value": with_text(NORM, "shape", "[" * 500_000),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused_by_the_name_of_the_file(case, folder_of):
    folder = rewritten(folder_of("llama"), HEADERS[case])
    assert re.search(r"model\.safetensors is damaged|cannot load \S+model: ", refusal_of(folder))


@pytest.mark.parametrize("size", [0, 1 << 40, (1 << 64) - 1])
def test_a_header_of_another_size_is_refused(size, folder_of):
    folder = folder_of("llama")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + data[8:])
    assert "model.safetensors is damaged" in refusal_of(folder)


def test_a_tensor_in_two_files_is_refused_by_both(folder_of):
    folder = folder_of("llama")
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    for name in ("a", "b"):
        own = tensors if name == "a" else {NORM: 2 * tensors[NORM]}
        save_file(own, folder / f"{name}.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(tensors, "a.safetensors") | {NORM: "b.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    assert f"a.safetensors and b.safetensors both have {NORM}" in refusal_of(folder)


Q = "model.layers.0.self_attn.q_proj.weight"
BLOCK = FP8 | {"strategy": "block"}
#: A packer, its note, tensors that are added, and what the refusal says.
NOTES = {
    "GPTQ: a group of 2^63": (
        gptq_packed(size=-1),
        gptq_note(group_size=1 << 63),
        {},
        "quantization_config.group_size is 9223372036854775808",
    ),
    "GPTQ: a group of 2^62": (
        gptq_packed(size=-1),
        gptq_note(group_size=HUGE),
        {},
        "quantization_config.group_size = 4611686018427387904",
    ),
    "GPTQ: a plain weight, too": (
        gptq_packed(),
        gptq_note(),
        {Q: torch.zeros(64, 64)},
        f"{Q}, but it is stored as weight, too",
    ),
    "GPTQ: bits": (gptq_packed(), gptq_note(bits=HUGE), {}, "quantization_config.bits ="),
    "AWQ: a group of 2^62": (awq_packed(), awq_note(group_size=HUGE), {}, "group_size ="),
    "AWQ: a plain weight, too": (
        awq_packed(),
        awq_note(),
        {Q: torch.zeros(64, 64)},
        f"{Q}, but it is stored as weight, too",
    ),
    "packed: a plain weight, too": (
        packed(),
        described(),
        {Q: torch.zeros(64, 64)},
        f"{Q}, but it is stored as weight, too",
    ),
    "packed: a shape of 2^62": (
        packed(),
        described(),
        {Q.replace("weight", "weight_shape"): torch.tensor([64, HUGE])},
        "describes a weight [64, 4611686018427387904]",
    ),
    "packed: an empty shape": (
        packed(),
        described(),
        {Q.replace("weight", "weight_shape"): torch.tensor([64, 0])},
        "its weight_shape is [64, 0]",
    ),
    "packed: groups of 2^62": (
        packed(),
        described({"group_size": HUGE}),
        {},
        "config_groups.group_0.weights.group_size =",
    ),
    "floats: blocks of 2^62": (
        floats((32, 48)),
        described(BLOCK | {"block_structure": [1, HUGE]}),
        {},
        "config_groups.group_0.weights.block_structure =",
    ),
    "a hundred thousand groups": (
        packed(),
        described() | {"config_groups": {str(i): {"weights": {}} for i in range(100_000)}},
        {},
        "is one of more than 131072 values",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_a_quantized_checkpoint_that_lies_is_refused_by_field_or_weight(case, tmp_path):
    packer, described_as, tensors, expected = NOTES[case]
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", packer, described_as)
    change(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    assert expected in refusal_of(folder)


def test_blocks_that_are_larger_than_a_weight_take_no_memory(tmp_path):
    """They are served: the last block of a weight may be smaller."""
    note_of = described(BLOCK | {"block_structure": [1 << 30, 1 << 30]})
    folder = save_packed(CONFIGS["llama"], tmp_path / "m", floats((-1, -1)), note_of)
    with pytest.raises(AssertionError, match=r"^it was loaded$"):
        refusal_of(folder)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return write_gguf(
        tiny_model("llama"), tmp_path_factory.mktemp("gguf") / "m.gguf", kind=Type.Q8_0
    )


def with_tensor(content: bytes, name: bytes, *, shape=None, offset=None) -> bytes:
    """Another shape or offset of a tensor of two dimensions."""
    changed = bytearray(content)
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    for place, size in enumerate(shape or ()):
        changed[at + 8 * place : at + 8 * place + 8] = struct.pack("<Q", size)
    if offset is not None:
        changed[at + 20 : at + 28] = struct.pack("<Q", offset)
    return bytes(changed)


K = b"blk.1.attn_k.weight"
TENSORS = {
    "a dimension of 2^63": ({"shape": (64, 1 << 63)}, "is truncated: blk.1.attn_k.weight ends"),
    "all bits of a dimension": (
        {"shape": ((1 << 64) - 64, (1 << 64) - 1)},
        "is truncated: blk.1.attn_k.weight ends",
    ),
    "an empty dimension": ({"shape": (64, 0)}, "the tensor blk.1.attn_k.weight has no elements"),
    "no whole blocks": ({"shape": (33, 32)}, "rows of blk.1.attn_k.weight have 33 elements"),
    "an offset of 2^63": ({"offset": 1 << 63}, "is truncated: blk.1.attn_k.weight ends"),
    "all bits of an offset": ({"offset": (1 << 64) - 1}, "is truncated: blk.1.attn_k.weight ends"),
    "an offset in another tensor": ({"offset": 32}, "overlap"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_of_a_gguf_file_that_lies_is_refused_by_its_name(case, gguf, tmp_path):
    changes, expected = TENSORS[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(with_tensor(gguf.read_bytes(), K, **changes))
    assert expected in refusal_of(file)


METADATA = {
    "layers": ({"llama.block_count": (1 << 31) - 1}, "lacks the tensor blk.2."),
    "a vocabulary": (
        {"llama.vocab_size": (1 << 31) - 1},
        "stores token_embd.weight with the shape",
    ),
    "a width": ({"llama.embedding_length": (1 << 31) - 64}, "with the shape"),
    "an inner width": ({"llama.feed_forward_length": (1 << 31) - 1}, "with the shape"),
    "heads": ({"llama.attention.head_count": (1 << 31) - 2}, "heads"),
    "an alignment": ({"general.alignment": 1 << 31}, "is truncated"),
    "an alignment of zero": ({"general.alignment": 0}, "its alignment 0 is no power of two"),
    "parts": ({"split.count": 65_535}, "lists 65535 parts"),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_lies_is_refused_by_its_key_or_a_tensor(case, tmp_path):
    more, expected = METADATA[case]
    file = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", more=more)
    assert expected in refusal_of(file)


def test_arrays_together_have_no_more_elements_than_one_may(tmp_path):
    """A reader of the library makes objects for each of their texts."""
    array = struct.pack("<IQ", 8, 1 << 20) + bytes(8 << 20)
    arrays = [key(b"a%d" % number, 9) + array for number in range(5)]
    file = tmp_path / "m.gguf"
    file.write_bytes(lying(0, len(arrays), *arrays))
    with pytest.raises(ModelRefused, match="1048576 elements of a4; at most 0 are read"):
        read_header(file)


def test_a_key_or_a_tensor_that_occurs_twice_is_refused(gguf, tmp_path):
    file = tmp_path / "m.gguf"
    twice = key(b"a", 4) + struct.pack("<I", 1)
    file.write_bytes(lying(0, 2, twice, twice))
    assert "the metadata key a occurs twice" in refusal_of(file)
    file.write_bytes(gguf.read_bytes().replace(b"blk.1.attn_k", b"blk.1.attn_q"))
    assert "it lists a tensor twice" in refusal_of(file)
