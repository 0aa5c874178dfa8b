"""Whatever is wrong with a config, the model is refused, with what transformers says about it."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.wide.loader import load_model
from tests.engine.model.builders import CONFIGS, save_model
from tests.engine.model.decoders import FAMILIES


def spoil(folder: Path, fields: dict) -> Path:
    """Change some fields of the config in a model's folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rms_norm_eps": None}, r"'rms_norm_eps': TypeError: .*expected float, got NoneType"),
        ({"num_attention_heads": 0}, "is not usable: integer modulo by zero"),
        ({"num_key_value_heads": 0}, r"cannot load .*: integer division or modulo by zero"),
        ({"head_dim": 0}, r"cannot load .*: 0\.0 cannot be raised to a negative power"),
        ({"pad_token_id": 10**9}, r"cannot load .*: Padding_idx must be within num_embeddings"),
        ({"dtype": "rational"}, r"is not usable: .*has no attribute 'rational'"),
        ({"dtype": 16}, r"cannot load .*: 'int' object has no attribute"),
        ({"model_type": {}}, "has no type {}"),
    ],
)
def test_a_wrong_value_is_a_reason_in_one_sentence(fields, reason, model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    with pytest.raises(ModelRefused, match=reason) as refused:
        load_model(spoil(folder, fields))
    assert "\n" not in str(refused.value)


def test_what_is_no_object_is_no_config(tmp_path):
    folder = save_model(CONFIGS["llama"], tmp_path)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelRefused, match=r"config\.json is not a JSON object"):
        load_model(folder)


def test_what_is_nested_too_deeply_is_not_read(tmp_path):
    folder = save_model(CONFIGS["llama"], tmp_path)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read: maximum recursion"):
        load_model(folder)


def test_fields_that_contradict_each_other_are_noticed_by_the_probe(tmp_path):
    folder = save_model(FAMILIES["qwen3, window in some layers"], tmp_path)
    loaded = load_model(spoil(folder, {"sliding_window": None}))
    with pytest.raises(ModelRefused, match=r"cannot be computed in .*: Could not find a `sliding"):
        probe(loaded.model, max_model_len=loaded.max_model_len)


def test_what_only_the_attention_of_the_model_itself_cannot_compute_is_refused(tmp_path):
    """Our attention shares keys between heads; in this family each head has its own."""
    config = copy.deepcopy(CONFIGS["deepseek"])
    config.num_key_value_heads = config.num_attention_heads // 2
    loaded = load_model(save_model(config, tmp_path))
    with pytest.raises(ModelRefused, match=r"cannot be computed in .*: The size of tensor a"):
        probe(loaded.model, max_model_len=loaded.max_model_len)
