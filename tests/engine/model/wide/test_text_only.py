"""Text models of multimodal checkpoints: the tokens of the whole model, without its towers."""

import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.wide import text_only
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    _GROUPED,
    ROOT,
    Oracle,
    generate,
    make_runner,
    requests_of,
    save_model,
)
from tests.engine.model.wide.wrappers import WRAPPERS

#: Seeds of weights with which no two tokens are nearly as likely; 0 where there is none.
SEEDS = {"qwen3_vl_moe": 1}
#: The fast path does not know their text model, or a tensor beside it.
WIDE = {
    "aya_vision",
    "cohere2_vision",
    "glm4v",
    "llama4",
    "llava_next",
    "llava_onevision",
}


#: Its text model sees the prompt in both directions.
PALIGEMMA = transformers.PaliGemmaConfig(
    vision_config=WRAPPERS["gemma3"].vision_config.to_dict(),
    text_config=transformers.GemmaConfig(**_GROUPED, head_dim=16).to_dict(),
    image_token_index=10,
)


def whole_class(config):
    return transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder(name):
        if name not in folders:
            config = WRAPPERS[name]
            folders[name] = save_model(
                config,
                tmp_path_factory.mktemp(name),
                seed=SEEDS.get(name, 0),
                model_class=whole_class(config),
            )
        return folders[name]

    return folder


def test_every_served_wrapper_is_tested():
    assert WRAPPERS.keys() == text_only.WRAPPERS


def test_every_served_wrapper_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "checkpoints.md").read_text()
    entry = page.split("- the text model of a multimodal checkpoint")[1].split("\n- ")[0]
    assert set(re.findall(r"`(\w+)`", entry)) - {"model_type"} == text_only.WRAPPERS


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_prompt_of_text_gets_the_tokens_of_the_whole_model(name, folder_of):
    """What is preempted or resumed goes on as in every other model: test_golden_tokens."""
    folder = folder_of(name)
    expected = Oracle(folder, model_class=whole_class(WRAPPERS[name])).alone()
    runner = make_runner(folder)
    assert (runner.model.name == "transformers") == (name in WIDE)
    assert generate(runner, requests_of(), max_num_batched_tokens=7).tokens == expected


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_towers_are_not_loaded(name, folder_of):
    model = load_model(folder_of(name)).model
    with torch.device("meta"):
        whole = whole_class(WRAPPERS[name])(WRAPPERS[name])
    lacking = whole.state_dict().keys() - model.state_dict().keys()
    assert any("vis" in tensor for tensor in lacking)
    assert not any(parameter.is_meta for parameter in model.parameters())
    text = model.get_decoder().state_dict().values()
    rest = sum(map(torch.numel, model.state_dict().values())) - sum(map(torch.numel, text))
    assert rest <= 2 * WRAPPERS[name].get_text_config().vocab_size * 64


@pytest.mark.parametrize("name", ["gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_the_names_of_current_and_of_older_checkpoints_give_the_same_model(
    name, folder_of, tmp_path
):
    whole = whole_class(WRAPPERS[name]).from_pretrained(folder_of(name))
    whole.save_pretrained(tmp_path, save_original_format=False)
    expected = load_model(folder_of(name)).model.state_dict()
    found = load_model(tmp_path).model.state_dict()
    assert found.keys() == expected.keys()
    for tensor in found:
        assert torch.equal(found[tensor], expected[tensor])


def change(source, folder, *, without: str = "", **tensors):
    """A copy of a checkpoint with other tensors; `__` in a name stands for a dot."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights.pop(without, None)
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_checkpoint_without_the_tensors_of_the_towers_is_loaded(folder_of, tmp_path):
    folder = change(folder_of("qwen3_vl"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in weights.items() if ".visual." not in name}
    assert len(text) < len(weights)
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model__visual__blocks__7__norm1__weight",
        "model__audio_tower__weight",
        "model__language_model__layers__0__self_attn__q_proj__bias",
    ],
)
def test_a_tensor_that_neither_the_text_nor_a_tower_has_is_refused(name, folder_of, tmp_path):
    folder = change(folder_of("qwen3_vl"), tmp_path, **{name: torch.ones(64)})
    expected = rf"^model\.safetensors has {name.replace('__', '.')}, which Qwen3VLForConditional"
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


def test_a_tensor_of_the_text_that_is_missing_is_refused(folder_of, tmp_path):
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    folder = change(folder_of("qwen3_vl"), tmp_path, without=name)
    with pytest.raises(ModelRefused, match=f"lack 1 tensors, {name}"):
        load_model(folder)


def test_a_quantized_tower_is_refused_although_it_is_not_used(folder_of, tmp_path):
    name = "model__visual__blocks__0__norm1__weight"
    quantized = {name: torch.ones(32, dtype=torch.int8)}
    folder = change(folder_of("qwen3_vl"), tmp_path, **quantized)
    with pytest.raises(ModelRefused, match="as I8, which is no plain float"):
        load_model(folder)


def test_an_unknown_wrapper_is_refused_by_name(tmp_path):
    save_model(PALIGEMMA, tmp_path, model_class=whole_class(PALIGEMMA))
    expected = (
        "^paligemma is a multimodal model whose text model is not served; served are those of "
        r"aya_vision, .*, qwen3_vl, qwen3_vl_moe, smolvlm$"
    )
    with pytest.raises(ModelRefused, match=expected):
        load_model(tmp_path)


def test_an_unknown_wrapper_would_be_refused_by_its_attention(tmp_path, monkeypatch):
    save_model(PALIGEMMA, tmp_path, model_class=whole_class(PALIGEMMA))
    monkeypatch.setattr(text_only, "WRAPPERS", text_only.WRAPPERS | {"paligemma"})
    with pytest.raises(ModelRefused, match="looks at later tokens too"):
        make_runner(tmp_path)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_wrapper_that_numbers_the_tokens_of_a_step_itself_is_refused(name, folder_of):
    """Rotary angles of time, height and width come from positions, which text must be given."""
    loaded = load_model(folder_of(name))
    text = loaded.model.get_decoder()
    rotary = text.rotary_emb.forward

    def counting(hidden, position_ids):
        return rotary(hidden, torch.arange(position_ids.shape[-1]).expand_as(position_ids))

    text.rotary_emb.forward = counting
    with pytest.raises(ModelRefused, match="has other logits with paged attention"):
        probe(loaded.model, max_model_len=256)
