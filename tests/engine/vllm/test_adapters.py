"""Adapters for vLLM are those that the native engine serves, with the same fingerprints."""

import json
from pathlib import Path

import pytest
import torch

from engine.errors import ModelRefused
from engine.model.adapters import read_adapters
from engine.model.wide.loader import load_model
from engine.vllm.adapters import NO_ADAPTER, RANKS, check_adapters
from tests.engine.model.adapted import ALPHA, save_adapter

EMBEDDED_MODEL = Path(__file__).parents[3] / "models" / "abacus"


@pytest.fixture(scope="module")
def model() -> Path:
    """Its config is enough: no weights of a model are read."""
    return EMBEDDED_MODEL


def test_they_have_the_fingerprints_that_the_native_engine_gives_them(model, tmp_path):
    folders = {
        "a": save_adapter(model, tmp_path / "a", r=4),
        "b": save_adapter(model, tmp_path / "b", r=2, rank_pattern={"q_proj": 9}),
    }
    checked = check_adapters(model, folders)
    native = read_adapters(load_model(model, dtype="float32").model, folders)
    assert checked.fingerprints == {one.name: one.fingerprint for one in native}
    assert checked.max_rank == 9
    assert checked.arguments(max_num_seqs=64) == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 2,
        "max_cpu_loras": 2,
    }
    assert checked.arguments(max_num_seqs=1)["max_loras"] == 1


def test_vllm_gets_configs_of_what_matters_and_the_weights_as_they_are(model, tmp_path):
    folder = save_adapter(
        model, tmp_path / "a", r=4, use_rslora=True, rank_pattern={"q_proj": 2}, lora_dropout=0.1
    )
    with check_adapters(model, {"a": folder}).plain_folders() as made:
        assert set(made) == {"a"}
        config = json.loads((made["a"] / "adapter_config.json").read_text())
        weights = (made["a"] / "adapter_model.safetensors").read_bytes()
    assert config == {
        "peft_type": "LORA",
        "target_modules": [],
        "r": 4,
        "lora_alpha": ALPHA,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
    }
    assert weights == (folder / "adapter_model.safetensors").read_bytes()


def test_on_a_cpu_requests_without_an_adapter_get_one_that_adds_zeros(model, tmp_path):
    folder = save_adapter(model, tmp_path / "a", r=4)
    checked = check_adapters(model, {"a": folder}, for_none=True)
    assert checked.arguments(max_num_seqs=1)["max_loras"] == 2
    with checked.plain_folders() as made:
        read = read_adapters(load_model(model, dtype="float32").model, {"none": made[NO_ADAPTER]})
    (layer,) = read[0].layers.values()
    assert layer.added(torch.ones(1, layer.down.shape[1])).abs().max() == 0


def test_without_adapters_vllm_gets_no_argument(model):
    assert check_adapters(model, {}).arguments(max_num_seqs=64) == {}


def test_a_larger_rank_than_vllm_has_is_refused_by_the_name_of_the_folder(model, tmp_path):
    folder = save_adapter(model, tmp_path / "large", r=RANKS[-1] + 1)
    with pytest.raises(ModelRefused, match=r"large .* has rank 513, and the limit is 512"):
        check_adapters(model, {"large": folder})


def test_what_the_native_engine_refuses_is_refused_with_its_words(model, tmp_path):
    folder = save_adapter(model, tmp_path / "dora", use_dora=True)
    with pytest.raises(ModelRefused, match="use_dora"):
        check_adapters(model, {"dora": folder})


def test_a_model_whose_layers_are_unknown_gets_no_adapters(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of tomorrow"}')
    with pytest.raises(ModelRefused, match="its layers are not known here"):
        check_adapters(tmp_path, {"a": tmp_path})
