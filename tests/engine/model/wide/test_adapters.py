"""Adapters on disk: what of PEFT's format is read, and how everything else is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.model.adapters import read_adapters
from engine.model.wide.loader import load_model
from tests.engine.model.adapted import ALPHA, save_adapter

Q_PROJ = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def model(model_folder):
    return load_model(model_folder("llama"), dtype="float32").model


@pytest.fixture
def folder(model_folder, tmp_path):
    return save_adapter(model_folder("llama"), tmp_path / "a", targets=["q_proj", "up_proj"])


def change_config(folder, **fields) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weights(folder, changes) -> None:
    """Tensors by name; one that is None is taken out."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, file)


def read(model, folder):
    (adapter,) = read_adapters(model, {"a": folder})
    return adapter


def test_an_adapter_is_read_as_it_was_saved(model, folder):
    adapter = read(model, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert adapter.name == "a"
    layers = [f"model.layers.{index}" for index in range(2)]
    expected = {f"{layer}.{end}" for layer in layers for end in ("self_attn.q_proj", "mlp.up_proj")}
    assert adapter.layers.keys() == expected
    part = adapter.layers[Q_PROJ]
    assert torch.equal(part.down, tensors[f"{PREFIX}{Q_PROJ}.lora_A.weight"])
    assert torch.equal(part.up, tensors[f"{PREFIX}{Q_PROJ}.lora_B.weight"])
    assert (part.rank, part.scale) == (8, ALPHA / 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_its_tensors_take_the_type_of_the_model(model_folder, folder, dtype):
    loaded = load_model(model_folder("llama"), dtype=dtype)
    part = read(loaded.model, folder).layers[Q_PROJ]
    assert part.down.dtype == part.up.dtype == loaded.dtype


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, {"q_proj": 3.0, "up_proj": 3.0}),
        ({"lora_alpha": 4}, {"q_proj": 0.5, "up_proj": 0.5}),
        ({"use_rslora": True}, {"q_proj": ALPHA / math.sqrt(8), "up_proj": ALPHA / math.sqrt(8)}),
        ({"alpha_pattern": {"q_proj": 8}}, {"q_proj": 1.0, "up_proj": 3.0}),
        ({"alpha_pattern": {r".*\.mlp\..*": 16}}, {"q_proj": 3.0, "up_proj": 2.0}),
        # The first that fits counts, and one fits whole parts of a name alone.
        ({"alpha_pattern": {"proj": 8, "up_proj": 16, "mlp.up_proj": 8}}, {"up_proj": 2.0}),
        ({"alpha_pattern": {r"^model\.layers\.0\.mlp\.up_proj": 8}}, {"up_proj": 1.0}),
        ({"rank_pattern": {"q_proj": 8, "up_proj": 8}, "r": 2}, {"q_proj": 3.0, "up_proj": 3.0}),
    ],
)
def test_the_scale_is_that_of_the_config(model, folder, fields, scales):
    change_config(folder, **fields)
    layers = read(model, folder).layers
    for end, scale in scales.items():
        (part,) = (part for name, part in layers.items() if ".0." in name and name.endswith(end))
        assert part.scale == pytest.approx(scale)


def test_ranks_may_differ_by_a_pattern(model_folder, model, tmp_path):
    folder = save_adapter(
        model_folder("llama"), tmp_path, targets=["q_proj", "up_proj"], rank_pattern={"up_proj": 3}
    )
    ranks = {
        name.rpartition(".")[2]: part.rank for name, part in read(model, folder).layers.items()
    }
    assert ranks == {"q_proj": 8, "up_proj": 3}


def test_its_fingerprint_changes_with_config_and_weights_and_with_nothing_else(
    model, model_folder, folder, tmp_path
):
    again = save_adapter(model_folder("llama"), tmp_path / "b", targets=["q_proj", "up_proj"])
    first = read(model, folder).fingerprint
    assert read(model, again).fingerprint == first
    change_weights(again, {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(8, 64)})
    second = read(model, again).fingerprint
    change_config(again, lora_alpha=ALPHA + 1)
    assert len({first, second, read(model, again).fingerprint}) == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"peft_type": None}, "peft_type = None"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', .* save it as a plain LoRA"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights = 'lora_ga'"),
        ({"use_dora": True}, "use_dora = True, which this engine does not compute"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = "),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication = "),
        ({"trainable_token_indices": [1]}, "trainable_token_indices = "),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"of_the_future": 1}, "of_the_future = 1"),
        ({"lora_alpha": "24"}, "lora_alpha = '24'"),
        ({"lora_alpha": None}, "lora_alpha = None"),
        ({"lora_alpha": math.inf}, "lora_alpha = inf"),
        ({"lora_alpha": math.nan}, "lora_alpha = nan"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000"),
        ({"r": 0}, "r = 0"),
        ({"r": 2048}, r"r = 2048\S* for .* is not in 1 .. 1024"),
        ({"r": 4}, r"lora_A of .* is \(8, 64\); r and the model need \(4, 64\)"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern = "),
        ({"rank_pattern": {"(": 1}}, "rank_pattern has '\\('"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern\['q_proj'\] = '8'"),
    ],
)
def test_a_field_that_is_not_computed_refuses_it(model, folder, fields, reason):
    change_config(folder, **fields)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        read(model, folder)
    assert f"the adapter in {folder} cannot be served: " in str(refusal.value)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "use_dora": False,
            "modules_to_save": None,
            "layer_replication": [],
            "megatron_config": {},
        },
        {
            "bias": "none",
            "lora_dropout": 0.05,
            "target_modules": ["q_proj"],
            "inference_mode": True,
        },
        {"init_lora_weights": "gaussian", "task_type": None, "base_model_name_or_path": "/there"},
    ],
)
def test_fields_that_say_nothing_about_the_result_are_no_reason(model, folder, fields):
    change_config(folder, **fields)
    assert read(model, folder).layers


#: What PEFT 0.21 writes of a LoraConfig that says only which modules it is for.
WRITTEN_BY_PEFT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "/models/base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "up_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"task_type": None, "auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
        {"exclude_modules": ["o_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"target_modules": r".*(q_proj|up_proj)", "lora_dropout": 0.1},
        {"init_lora_weights": False},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        # A LoRA-GA that was converted: it has the weights of a plain one.
        {"lora_ga_config": {"direction": "ArB2r", "scale": "stable", "stable_gamma": 16}},
        {"corda_config": {"corda_method": "ipm"}},
        {"ensure_weight_tying": True},
    ],
)
def test_what_peft_writes_of_a_plain_lora_is_read(model, folder, fields):
    (folder / "adapter_config.json").write_text(json.dumps(WRITTEN_BY_PEFT | fields))
    assert {(part.rank, part.scale) for part in read(model, folder).layers.values()} == {(8, 1.0)}


def of(module: str, side: str, *shape: int) -> dict:
    return {f"{PREFIX}{module}.lora_{side}.weight": torch.ones(shape)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (of("lm_head", "A", 8, 64), "lm_head is not a linear layer in the model's layers"),
        (
            of("model.layers.7.mlp.up_proj", "A", 8, 64),
            r"model.layers.7.mlp.up_proj is not a linear",
        ),
        (of("model.layers.0.mlp", "A", 8, 64), "model.layers.0.mlp is not a linear"),
        (of("model.layers.0.input_layernorm", "A", 8, 64), "input_layernorm is not a linear"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(8, 9)}, "lora_embedding_A"),
        ({f"{PREFIX}{Q_PROJ}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector"),
        (
            {f"{PREFIX}{Q_PROJ}.lora_B.bias": torch.ones(64)},
            "is not the A or B of a linear layer",
        ),
        ({f"{PREFIX}lm_head.weight": torch.ones(211, 64)}, "lm_head.weight"),
        # PEFT takes the name of an adapter out of its tensors' names, and reads none that has it.
        ({f"{PREFIX}{Q_PROJ}.lora_A.default.weight": torch.ones(8, 64)}, "lora_A.default.weight"),
        ({f"{PREFIX}{Q_PROJ}.lora_B.weight": None}, "has only one of lora_A and lora_B"),
        (of(Q_PROJ, "A", 8, 32), r"lora_A of .* is \(8, 32\); r and the model need \(8, 64\)"),
        (of(Q_PROJ, "B", 32, 8), r"lora_B of .* is \(32, 8\); r and the model need \(64, 8\)"),
        (
            {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.full((8, 64), math.nan)},
            f"{Q_PROJ} has numbers that are not finite in torch.float32",
        ),
        (
            {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.full((8, 64), 1j)},
            f"lora_A of {Q_PROJ} has complex numbers",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_model_refuse_it(model, folder, changes, reason):
    change_weights(folder, changes)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        read(model, folder)
    assert str(folder) in str(refusal.value)


def test_numbers_that_the_models_type_cannot_hold_refuse_it(model_folder, folder):
    change_weights(folder, {f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.full((8, 64), 1e6)})
    model = load_model(model_folder("llama"), dtype="float16").model
    with pytest.raises(ModelRefused, match=r"not finite in torch\.float16"):
        read(model, folder)


def break_config(folder):
    (folder / "adapter_config.json").write_text("{")


def nest_config(folder):
    (folder / "adapter_config.json").write_text("[" * 100_000)


def list_config(folder):
    (folder / "adapter_config.json").write_text("[]")


def break_weights(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 64)


def empty_weights(folder):
    save_file({}, folder / "adapter_model.safetensors")


def pickle_weights(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json cannot be"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safetensors cannot be"),
        (break_config, "adapter_config.json is not JSON"),
        (nest_config, "adapter_config.json is not JSON: maximum recursion"),
        (list_config, "adapter_config.json is not a JSON object"),
        (break_weights, "is not in safetensors format"),
        (empty_weights, "adapter_model.safetensors has no tensors"),
        (pickle_weights, r"its weights are pickled \(adapter_model.bin\)"),
    ],
)
def test_files_that_are_missing_or_broken_refuse_it(model, folder, damage, reason):
    damage(folder)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        read(model, folder)
    assert str(folder) in str(refusal.value)


def test_a_layer_that_is_no_linear_one_refuses_it(model_folder, tmp_path):
    """GPT-2's products are Conv1D, whose weights lie the other way round."""
    loaded = load_model(model_folder("gpt2"), dtype="float32")
    folder = save_adapter(model_folder("llama"), tmp_path)
    change_weights(folder, of("transformer.h.0.attn.c_attn", "A", 8, 64))
    with pytest.raises(ModelRefused, match="is not a linear layer in the model's layers"):
        read(loaded.model, folder)
