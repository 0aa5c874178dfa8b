"""The tensors of a checkpoint and those of its model are the same, or the model is refused."""

import json
import shutil
import tracemalloc

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.model.wide.loader import load_model
from engine.model.wide.stored_tensors import finder, stored_tensors
from tests.engine.model.builders import CONFIGS, ROOT
from tests.engine.model.wide.quantized import UNKNOWN_SCALES, note, save_quantized

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder("llama"), tmp_path / "model")


def change(folder, **tensors) -> None:
    """Add tensors to the weights of a model; `__` in a name stands for a dot."""
    weights = load_file(folder / WEIGHTS)
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def shard(folder) -> dict:
    """Split the weights of a model into shards; returns the index."""
    (folder / WEIGHTS).unlink()
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIGS["llama"]).save_pretrained(folder, max_shard_size="100KB")
    return json.loads((folder / INDEX).read_text())


def test_the_embedded_model_is_loaded():
    load_model(ROOT / "models" / "abacus")


def test_shards_are_loaded(folder):
    assert len(set(shard(folder)["weight_map"].values())) > 1
    load_model(folder)


def test_masks_and_positions_of_old_checkpoints_are_loaded(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("gpt2"), tmp_path, dirs_exist_ok=True)
    mask = torch.ones(1, 1, 256, 256, dtype=torch.uint8)
    positions = torch.arange(256)
    change(folder, h__0__attn__bias=mask, h__0__attn__masked_bias=torch.tensor(-1e4))
    change(folder, transformer__position_ids=positions)
    load_model(folder)


def test_frequencies_of_old_checkpoints_are_loaded(folder):
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_model(folder)


def test_layers_that_only_speculate_are_loaded(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("deepseek"), tmp_path, dirs_exist_ok=True)
    change(
        folder, model__layers__2__eh_proj__weight=torch.ones(4, 4), mtp__norm__weight=torch.ones(4)
    )
    load_model(note(folder, num_nextn_predict_layers=1))
    with pytest.raises(ModelRefused, match=r"has model\.layers\.2\.eh_proj\.weight, which"):
        load_model(note(folder, num_nextn_predict_layers=0))


def test_scales_under_an_unknown_name_are_refused(model_folder, tmp_path):
    folder = save_quantized(model_folder("llama"), tmp_path, UNKNOWN_SCALES)
    expected = (
        r"^model\.safetensors has model\.layers\.0\.mlp\.down_proj\.stretch, which "
        r"LlamaForCausalLM does not use \(14 such tensors\): use config\.json and weights of"
    )
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


def test_a_bias_that_the_config_does_not_have_is_refused(folder):
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(ModelRefused, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which"):
        load_model(folder)


def test_more_layers_than_the_config_has_are_refused(folder):
    with pytest.raises(ModelRefused, match=r"has model\.layers\.1\.\S+, which LlamaForCausalLM"):
        load_model(note(folder, num_hidden_layers=1))


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(folder):
    expected = (
        r"do not fit config\.json: model\.layers\.0\.mlp\.down_proj\.weight is stored with the "
        r"shape \[64, 96\], but the model needs \[64, 80\]: use config\.json and weights of"
    )
    with pytest.raises(ModelRefused, match=expected):
        load_model(note(folder, intermediate_size=80))


def test_experts_of_different_shapes_are_refused(model_folder, tmp_path):
    """transformers stacks the experts of a layer before it compares shapes."""
    folder = shutil.copytree(model_folder("mixtral"), tmp_path / "model")
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    change(folder, **{name: torch.ones(96, 63)})
    expected = (
        r"^the weights of \S+ do not fit together: transformers cannot build tensors of the model "
        r"from them, and has logged which: use config\.json and weights of the same checkpoint$"
    )
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


def test_a_checkpoint_of_the_hub_is_checked_in_the_same_way(folder, monkeypatch):
    def cached_file(path, name, **_):
        assert path == "own/tiny"
        return str(folder / name) if (folder / name).exists() else None

    monkeypatch.setattr("engine.model.wide.stored_tensors.cached_file", cached_file)
    found = list(stored_tensors(finder("own/tiny", folder)))
    assert found == list(stored_tensors(finder(folder, folder)))
    assert finder("own/tiny", folder)("hf_quant_config.json") is None


def test_a_distributed_checkpoint_is_refused(folder):
    name = "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(folder / WEIGHTS, folder / name)
    with pytest.raises(ModelRefused, match=f"^{name} is a part of a distributed checkpoint: save"):
        load_model(folder)


def header(*, size: int | None = None, data: bytes = b"\0" * 4, **tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def facts(**changes) -> dict:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes


DAMAGED = {
    "empty": b"",
    "no whole size": b"\1\0\0",
    "a size beyond the end": header(size=1000, a=facts()),
    "a size beyond all files": b"\xff" * 100,
    "no JSON": (5).to_bytes(8, "little") + b"{]...",
    "no text": (5).to_bytes(8, "little") + b"\xff" * 5,
    "nested too deeply": (10**5).to_bytes(8, "little") + b"[" * 10**5,
    "no object": (2).to_bytes(8, "little") + b"[]",
    "a tensor that is no object": header(a=1),
    "a tensor without a type": header(a={"shape": [1]}),
    "a tensor of a type that is no text": header(a=facts(dtype=8)),
    "a tensor without a shape": header(a={"dtype": "F32"}),
    "a shape of less than nothing": header(a=facts(shape=[-1])),
    "a shape beyond all memory": header(a=facts(shape=[2**40, 2**40])),
    "a shape of texts": header(a=facts(shape=["1"])),
    "weights that are cut off": header(a=facts(data_offsets=[0, 400])),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_by_name(kind, folder):
    (folder / WEIGHTS).write_bytes(DAMAGED[kind])
    with pytest.raises(ModelRefused) as refused:
        load_model(folder)
    text = str(refused.value)
    assert text.startswith("model.safetensors is damaged (")
    assert text.endswith("): download or save it again")
    assert "\n" not in text


def test_a_damaged_shard_is_refused_by_name(folder):
    name = max(shard(folder)["weight_map"].values())
    (folder / name).write_bytes(b"")
    with pytest.raises(ModelRefused, match=rf"^{name} is damaged \("):
        load_model(folder)


def test_a_missing_shard_is_refused_by_name(folder):
    name = max(shard(folder)["weight_map"].values())
    (folder / name).unlink()
    expected = rf"^the checkpoint lacks its weight file {name}: download it again"
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", r"^model\.safetensors\.index\.json is damaged \("),
        ("[]", r"^model\.safetensors\.index\.json is damaged \("),
        ("{}", r"^model\.safetensors\.index\.json is damaged \("),
        ('{"weight_map": {}}', r"^model\.safetensors\.index\.json lists no weights"),
        ('{"weight_map": {"a": 1}}', "names 1 as a weight file, which is no file beside it"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "names '../b.safetensors' as a weight file"),
        ('{"weight_map": {"a": "/b.safetensors"}}', "names '/b.safetensors' as a weight file"),
        ('{"weight_map": {"a": "b.bin"}}', "names the weight file b.bin, which is not safetensors"),
    ],
)
def test_a_damaged_index_is_refused(index, reason, folder):
    shard(folder)
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelRefused, match=reason):
        load_model(folder)


def test_the_file_that_the_config_names_is_the_one_that_is_read(folder):
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    load_model(note(folder, transformers_weights="other.safetensors"))
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"^other\.safetensors is damaged"):
        load_model(folder)


def test_only_headers_are_read(folder):
    """A file of 64 GiB, all of it a hole, takes no memory and no time."""
    size = 1 << 36
    data = header(data=b"", a=facts(shape=[size // 4], data_offsets=[0, size]))
    with (folder / WEIGHTS).open("wb") as stream:
        stream.write(data)
        stream.truncate(len(data) + size)
    tracemalloc.start()
    (tensor,) = stored_tensors(finder(folder, folder))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensor.shape == (size // 4,)
    assert peak < 1 << 20
