"""Prompts with pictures: the tokens of transformers, however the prompt is computed."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelRefused
from engine.model.device.pool_size import NO_ENCODER, EncoderMemory
from engine.model.load import load_runner
from engine.model.load.encoder_memory import encoder_memory
from engine.model.wide import fingerprint, picture_reader
from engine.model.wide.loader import load_model
from engine.model.wide.picture_reader import PictureReader
from engine.vllm import config
from tests.engine.model.builders import ROOT, engine_over, generate, make_runner, save_model
from tests.engine.model.memory import Memory
from tests.engine.model.wide.pictured import (
    FAMILIES,
    PROMPTS,
    Stage,
    config_of,
    noise,
    runner_of,
    whole_class,
)
from tests.engine.model.wide.wrappers import WRAPPERS

#: Too few blocks for all prompts at once, enough for each alone.
SCARCE = {"num_blocks": 18, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @functools.cache
    def folder(name):
        made = tmp_path_factory.mktemp(name)
        seed = FAMILIES[name].seed
        return save_model(config_of(name), made, seed=seed, model_class=whole_class(name))

    return folder


@pytest.fixture(scope="module")
def stage_of(folder_of):
    return functools.cache(lambda name: Stage(name, folder_of(name)))


def run(stage, requests, **overrides):
    return generate(stage.runner, requests, reads_pictures=True, **overrides)


def test_every_type_whose_pictures_are_read_is_tested():
    assert FAMILIES.keys() == picture_reader.READERS


def test_every_type_whose_pictures_are_read_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "checkpoints.md").read_text()
    entry = page.split("- the pictures of some of them")[1].split("\n- ")[0]
    assert set(re.findall(r"`(\w+)`", entry)) - {"pictures"} == picture_reader.READERS


def test_the_reference_says_which_engine_reads_the_pictures_of_which_type():
    rows = (ROOT / "docs" / "reference" / "pictures.md").read_text().split("\n| type |")[1]
    cells = [row.split("|")[1:5] for row in rows.split("\n\n")[0].splitlines()[2:]]
    native, vllm = (
        {name for row in cells if "yes" in row[place] for name in re.findall(r"`(\w+)`", row[0])}
        for place in (2, 3)
    )
    assert (native, vllm) == (picture_reader.READERS, config.READERS)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_with_pictures_get_the_tokens_of_transformers(name, stage_of):
    """Alone, together, and in chunks that begin and end inside of pictures."""
    stage = stage_of(name)
    for request in stage.requests():
        alone = run(stage, [request]).tokens[request.request_id]
        assert alone == stage.expected[request.request_id]
    assert run(stage, stage.requests()).tokens == stage.expected
    assert run(stage, stage.requests(), max_num_batched_tokens=8).tokens == stage.expected
    assert run(stage, stage.requests(), long_prefill_token_threshold=2).tokens == stage.expected


@pytest.mark.parametrize("name", FAMILIES)
def test_every_picture_changes_what_comes(name, stage_of):
    """Otherwise equal tokens would say nothing about pictures."""
    stage = stage_of(name)
    for index, prompt in enumerate(PROMPTS):
        for place in range(len(stage.request(index, prompt).pictures)):
            request = stage.request(index, prompt)
            pictures = list(request.pictures)
            pictures[place] = negative(pictures[place])
            request.pictures = tuple(pictures)
            assert run(stage, [request]).tokens[str(index)] != stage.expected[str(index)]


def negative(picture):
    pixels = {
        name: -values if values.dtype == np.float32 else values
        for name, values in picture.pixels.items()
    }
    return replace(picture, digest=picture.digest[::-1], pixels=pixels)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_preempted_gets_the_tokens_of_transformers(name, mode, stage_of):
    stage = stage_of(name)
    found = run(stage, stage.requests(), preemption_mode=mode, **SCARCE)
    assert getattr(found.snapshot, f"preemptions_{mode}") > 0
    assert found.tokens == stage.expected


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_taken_over_goes_on_as_undisturbed(name, stage_of):
    stage = stage_of(name)
    published = {key: tokens[:5] for key, tokens in stage.expected.items()}
    found = run(stage, stage.requests(published), max_num_batched_tokens=8).tokens
    assert found == {key: tokens[5:] for key, tokens in stage.expected.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_of_an_encoder_is_told_as_it_ends(name, stage_of):
    """So a worker knows that a long step goes on. A step without a picture tells nothing."""
    stage = stage_of(name)
    reader, heads = stage.runner.model.picture_reader, []
    vision = config_of(name).vision_config
    num_layers = getattr(vision, "num_hidden_layers", None) or vision.depth
    reader.follow(lambda: heads.append(len(reader._kept)))
    try:
        reader._kept.clear()
        run(stage, [stage.request(0, PROMPTS[0])])
        assert heads == []
        run(stage, [stage.request(3, PROMPTS[3])])
    finally:
        reader.follow(lambda: None)
    # Its two pictures, one after the other.
    assert heads.count(0) >= num_layers and heads.count(1) >= num_layers


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl"])
def test_a_gpu_keeps_the_memory_free_that_the_largest_picture_was_seen_to_take(name, stage_of):
    """On a CPU the same function measures tensors that are alive."""
    stage, cuda, sources = stage_of(name), torch.device("cuda"), []

    def seen(picture, device=cuda):
        def largest(source):
            sources.append(source)
            return stage.family.pixels(picture, 1)

        model = stage.runner.model
        return encoder_memory(model, device, Path("model"), largest, measure=most_bytes_of)

    # Of one tile or 12 patches, and of three or 16.
    small, large = seen("c"), seen("b")
    pixels = sum(values.nbytes for values in stage.family.pixels("c", 1).values())
    assert small.kept_bytes == large.kept_bytes == stage.runner.model.picture_reader.max_kept_bytes
    assert large.encoding_bytes > small.encoding_bytes > pixels // 4
    assert sources == [Path("model")] * 2
    assert seen("a", torch.device("cpu")) == NO_ENCODER and len(sources) == 2


def most_bytes_of(run, _):
    with Memory() as memory:
        run()
    return memory.most


def test_a_pool_gets_what_the_largest_picture_leaves(stage_of, monkeypatch):
    folder, given = stage_of("smolvlm").runner.config_facts.tokenizer_source, []

    def needs_all(*arguments):
        given.append(arguments)
        return EncoderMemory(1 << 60, 0)

    monkeypatch.setattr(load_runner, "encoder_memory", needs_all)
    with pytest.raises(ModelRefused, match="bytes are left for the KV cache"):
        runner_of(folder, num_blocks=None, largest_picture=noise)
    ((model, device, source, largest),) = given
    assert model.picture_reader is not None and largest is noise
    assert (device.type, source) == ("cpu", folder)


def test_an_encoder_without_memory_for_one_picture_is_refused_by_its_setting(stage_of):
    stage = stage_of("smolvlm")

    def measure(run, _):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pytest.raises(ModelRefused, match="largest picture: set or lower max_picture_pixels"):
        encoder_memory(
            stage.runner.model, torch.device("cuda"), Path("model"),
            lambda _: stage.family.pixels("a", 1), measure=measure,
        )  # fmt: skip


def test_a_cached_prefix_is_that_of_the_same_picture(stage_of):
    stage = stage_of("smolvlm")
    first, same, other = (
        stage.request(index, prompt)
        for index, prompt in ((1, (5, "a", 9)),) * 2 + ((1, (5, "d", 9)),)
    )
    assert first.prompt_token_ids == other.prompt_token_ids
    same.request_id, other.request_id = "same", "other"
    found = generate(stage.runner, [first], [same], [other], reads_pictures=True).tokens
    assert found["same"] == found["1"] == stage.expected["1"]
    assert (same.num_cached_tokens, other.num_cached_tokens) == (
        (same.num_prompt_tokens - 1) // 4 * 4,
        4,
    )
    assert found["other"] == run(stage, [stage.request(1, (5, "d", 9))]).tokens["1"]
    assert found["other"] != found["1"]


def test_a_picture_is_encoded_once_and_what_is_kept_is_bounded(stage_of, monkeypatch):
    stage = stage_of("smolvlm")
    encoded = []
    encode = PictureReader._encode

    def counting(self, pixels):
        encoded.append(id(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(PictureReader, "_encode", counting)
    model = stage.runner.model
    reader = model.picture_reader
    try:
        model.picture_reader = PictureReader(model.model)
        assert run(stage, stage.requests(), max_num_batched_tokens=8).tokens == stage.expected
        assert len(encoded) == len(set(encoded)) == 4
        # One picture is kept even if it is larger; every other one is encoded when it is needed.
        encoded.clear()
        model.picture_reader = small = PictureReader(model.model, max_kept_bytes=1)
        assert run(stage, stage.requests(), long_prefill_token_threshold=2).tokens == stage.expected
        assert len(encoded) > 4 and len(small._kept) == 1
        assert small._num_kept_bytes == sum(one.nbytes for one in small._kept.values())
    finally:
        model.picture_reader = reader


def test_a_picture_with_too_few_placeholders_ends_only_its_request(stage_of):
    stage = stage_of("smolvlm")
    good, bad = stage.request(1, PROMPTS[1]), stage.request(3, PROMPTS[3])
    bad.prompt_token_ids[bad.pictures[0].start] += 1
    engine = engine_over(stage.runner, reads_pictures=True)
    engine.add_request(good)
    engine.add_request(bad)
    errors = {}
    while engine.has_work():
        for output in engine.step(lambda: 0.0):
            if output.finish_reason is not None:
                errors[output.request_id] = output.error
    assert good.output_token_ids == stage.expected["1"]
    assert errors["1"] is None
    assert "placeholders stand for" in errors["3"]


def test_a_placeholder_outside_of_pictures_is_a_token_like_all(stage_of):
    """A caller may send any token ids; without a picture, they are computed as text."""
    stage = stage_of("smolvlm")
    request = stage.request(1, PROMPTS[1])
    request.prompt_token_ids[1] = 10
    beside = stage.request(2, PROMPTS[2])
    found = run(stage, [request, beside]).tokens
    assert found["2"] == stage.expected["2"]
    assert found["1"] != stage.expected["1"]


def test_a_model_is_loaded_with_its_encoder_only_if_asked(folder_of):
    folder = folder_of("smolvlm")
    plain, reading = make_runner(folder), runner_of(folder)
    assert not plain.config_facts.reads_pictures and reading.config_facts.reads_pictures
    assert plain.model.name != reading.model.name == "transformers"


def test_what_prepares_pictures_is_in_the_fingerprint(folder_of, tmp_path, monkeypatch):
    folder = save_model(WRAPPERS["llava"], tmp_path, model_class=whole_class("llava"))
    text, seen = load_model(folder).fingerprint, load_model(folder, pictures=True).fingerprint
    (folder / "preprocessor_config.json").write_text('{"do_resize": false}')
    assert load_model(folder).fingerprint == text
    assert (changed := load_model(folder, pictures=True).fingerprint) != seen
    monkeypatch.setattr(fingerprint, "PICTURE_LIBRARIES", ("numpy",))
    assert load_model(folder).fingerprint == text
    assert load_model(folder, pictures=True).fingerprint != changed


def save_tiny_adapter(folder, name, linear):
    """An adapter of one linear layer, of rank 2."""
    folder.mkdir()
    weights = {
        f"base_model.model.{name}.lora_A.weight": torch.ones(2, linear.in_features),
        f"base_model.model.{name}.lora_B.weight": torch.ones(linear.out_features, 2),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_may_change_the_text_model_only(stage_of, folder_of, tmp_path):
    stage = stage_of("smolvlm")
    linears = {
        name: module
        for name, module in stage.runner.model.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("layers.0.self_attn.q_proj")
    }
    folders = {
        part: save_tiny_adapter(tmp_path / part, name, linear)
        for name, linear in linears.items()
        for part in ("vision", "text")
        if part in name
    }
    with pytest.raises(ModelRefused, match=r"it changes model\.vision_model\..*encodes pictures"):
        runner_of(folder_of("smolvlm"), adapters=folders)
    runner = runner_of(folder_of("smolvlm"), adapters={"text": folders["text"]})
    plain, adapted = stage.request(1, PROMPTS[1]), stage.request(2, PROMPTS[1])
    adapted.adapter = "text"
    adapted.prompt_token_ids = list(plain.prompt_token_ids)
    found = generate(runner, [plain, adapted], reads_pictures=True, adapters=frozenset(folders))
    assert found.tokens["1"] == stage.expected["1"] != found.tokens["2"]
