"""Embeddings of encoders and decoders: those of transformers, in any batch; bad folders named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from engine.errors import ModelRefused
from engine.model.pooling import encoder
from engine.model.pooling.folder import task_of, vector_folder
from engine.request import Pooling
from tests.engine.model.pooling.vector_models import (
    CONFIGS,
    engine_of,
    load,
    own_states,
    save_vector_model,
    vectors,
)

POOL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bert": lambda states: states.mean(0),
    "roberta": lambda states: states[0],
    "mpnet": lambda states: states.max(0).values,
    "qwen3": lambda states: states[-1],
}
LENGTHS = (5, 1, 17, 30, 5, 62, 2, 44, 5, 31)
PROMPTS = [
    [3 + (31 * place + 7 * length + index) % 200 for place in range(length)]
    for index, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: save_vector_model(
            name,
            tmp_path_factory.mktemp(name) / "model",
            prompts={"query": "w1 w2 ", "document": ""},
            default_prompt_name="document",
        )
        for name in CONFIGS
    }


@pytest.fixture(scope="module")
def expected(folders) -> Callable[[str], torch.Tensor]:
    def compute(name: str) -> torch.Tensor:
        model = AutoModel.from_pretrained(folders[name], dtype=torch.float32).eval()
        pooled = [POOL[name](own_states(model, prompt)) for prompt in PROMPTS]
        return torch.stack([one / one.norm() for one in pooled])

    return compute


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_are_those_of_transformers_in_a_batch_and_alone(name, folders, expected):
    loaded, wanted = load(folders[name]), expected(name)
    together = vectors(engine_of(loaded), PROMPTS)
    assert float((together - wanted).abs().max()) < 1e-5
    alone = torch.cat([vectors(engine_of(loaded), [prompt]) for prompt in PROMPTS])
    assert float((together - alone).abs().max()) < 1e-5
    # The vectors differ, or the comparison would say nothing.
    assert float((wanted[0] - wanted[1]).abs().max()) > 1e-2


def test_a_decoder_has_bit_for_bit_the_same_vectors_in_chunks_and_from_the_cache(folders):
    loaded = load(folders["qwen3"], max_num_batched_tokens=64, block_size=4, num_blocks=64)
    if "decoder-torch" in loaded.facts.fingerprint:
        pytest.skip("the kernels cannot be built here")
    once = vectors(engine_of(loaded, enable_prefix_caching=False), PROMPTS)
    engine = engine_of(loaded, max_num_batched_tokens=7)
    assert torch.equal(vectors(engine, PROMPTS), once)
    assert torch.equal(vectors(engine, PROMPTS), once)
    assert engine.snapshot().cached_prompt_tokens > 0


def test_which_encoders_are_packed_is_found_out_by_their_states(folders, caplog):
    caplog.set_level("INFO")
    assert "encoder-packed-mean" in load(folders["bert"]).facts.fingerprint
    assert "encoder-packed-cls" in load(folders["roberta"]).facts.fingerprint
    assert "encoder-own-max" in load(folders["mpnet"]).facts.fingerprint
    assert "prompts are not packed: they are off by" in caplog.text


def test_a_wrong_packed_form_is_noticed(folders, monkeypatch):
    monkeypatch.setattr(encoder, "first_position", lambda model: 1)
    assert "encoder-own-mean" in load(folders["bert"]).facts.fingerprint


def test_fewer_dimensions_have_the_length_one_again(folders):
    loaded = load(folders["bert"])
    whole = vectors(engine_of(loaded), PROMPTS)
    cut = vectors(engine_of(loaded), PROMPTS, Pooling(dimensions=10))
    assert cut.shape == (len(PROMPTS), 10)
    wanted = whole[:, :10] / whole[:, :10].norm(dim=1, keepdim=True)
    assert float((cut - wanted).abs().max()) < 1e-6


def test_vectors_keep_their_length_without_a_normalize_module(tmp_path):
    folder = save_vector_model("bert", tmp_path / "model", normalizes=False)
    found = vectors(engine_of(load(folder)), PROMPTS)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = torch.stack([own_states(model, prompt).mean(0) for prompt in PROMPTS])
    assert float((found - wanted).abs().max()) < 1e-5


def test_a_plain_folder_gets_the_mean_of_an_encoder_and_the_last_token_of_a_decoder(
    folders, tmp_path, expected
):
    for name in ("bert", "qwen3"):
        folder = tmp_path / name
        shutil.copytree(folders[name], folder)
        (folder / "modules.json").unlink()
        assert task_of(folder) == "generate"
        found = vectors(engine_of(load(folder)), PROMPTS)
        assert float((found - expected(name)).abs().max()) < 1e-5
    assert "-cls-" in load(tmp_path / "bert", pooling="cls").facts.fingerprint


def test_a_decoder_whose_vector_is_a_mean_is_computed_whole(folders, tmp_path):
    found = load(folders["qwen3"], pooling="mean")
    assert found.is_encoder
    model = AutoModel.from_pretrained(folders["qwen3"], dtype=torch.float32).eval()
    means = torch.stack([own_states(model, prompt).mean(0) for prompt in PROMPTS])
    wanted = means / means.norm(dim=1, keepdim=True)
    assert float((vectors(engine_of(found), PROMPTS) - wanted).abs().max()) < 1e-5


def test_the_length_is_that_of_the_model_of_the_folder_or_of_the_setting(folders, tmp_path):
    assert load(folders["bert"]).facts.max_model_len == 64
    assert load(folders["roberta"]).facts.max_model_len == 62
    assert load(folders["bert"], max_model_len=32).facts.max_model_len == 32
    folder = tmp_path / "model"
    shutil.copytree(folders["bert"], folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    assert load(folder).facts.max_model_len == 16
    with pytest.raises(ModelRefused, match="max_num_batched_tokens"):
        load(folders["bert"], max_num_batched_tokens=32)


def test_another_pooling_is_another_fingerprint(folders):
    names = {load(folders["bert"], pooling=mode).facts.fingerprint for mode in ("cls", "mean")}
    assert len(names) == 2


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", [module("Transformer"), module("Dense", "2")], "Dense"),
        ("modules.json", [module("Transformer")], "no pooling"),
        ("modules.json", [module("Transformer", "..")], "outside"),
        ("modules.json", {}, "array"),
        ("modules.json", None, "cannot be read"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "'x'"),
        ("config_sentence_transformers.json", [], "object"),
    ],
)
def test_a_folder_that_cannot_be_served_as_it_is_meant_is_refused(
    folders, tmp_path, file, content, reason
):
    folder = tmp_path / "model"
    shutil.copytree(folders["bert"], folder)
    (folder / file).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ModelRefused, match=reason):
        vector_folder(folder, mode=None, default="mean")


def test_the_newer_form_of_the_pooling_file_is_read(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["bert"], folder)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    assert vector_folder(folder, mode=None, default="mean").mode == "cls"


def test_weights_that_lack_a_tensor_are_refused(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["bert"], folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="lack"):
        load(folder)
