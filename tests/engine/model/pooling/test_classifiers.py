"""Classification heads: the scores of transformers for texts and pairs, as probabilities or raw."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from engine.errors import ModelRefused
from engine.model.load.load_pooler import load_classifier
from engine.model.pooling.folder import task_of
from engine.request import Pooling
from tests.engine.model.pooling.vector_models import CONFIGS, engine_of, vectors

PROMPTS = [
    [3 + (31 * place + 7 * length + index) % 200 for place in range(length)]
    for index, length in enumerate((5, 1, 17, 30, 5, 62, 2, 44, 5, 31))
]


def save(name: str, folder, *, num_labels: int):
    config, _ = CONFIGS[name]
    config = type(config)(**config.to_dict() | {"num_labels": num_labels})
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def own_scores(folder, prompt: list[int], second_from: int | None = None) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    options = {}
    if second_from is not None:
        types = [int(place >= second_from) for place in range(len(prompt))]
        options["token_type_ids"] = torch.tensor([types])
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt]), **options).logits[0]


def load(folder, **options):
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": None}
    return load_classifier(folder, **{"dtype": "float32", "device": "cpu", **sizes, **options})


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_are_those_of_transformers(name, num_labels, tmp_path):
    folder = save(name, tmp_path / "model", num_labels=num_labels)
    assert task_of(folder) == "classify"
    loaded = load(folder)
    assert loaded.width == num_labels == len(loaded.labels)
    raw = torch.stack([own_scores(folder, prompt) for prompt in PROMPTS])
    found = vectors(engine_of(loaded), PROMPTS, Pooling(activates=False))
    assert float((found - raw).abs().max()) < 1e-5
    wanted = torch.sigmoid(raw) if num_labels == 1 else torch.softmax(raw, dim=1)
    probabilities = vectors(engine_of(loaded), PROMPTS)
    assert float((probabilities - wanted).abs().max()) < 1e-5
    assert float((raw[0] - raw[1]).abs().max()) > 1e-3


def test_the_labels_are_those_of_the_config_in_the_order_of_the_scores(tmp_path):
    folder = save("bert", tmp_path / "model", num_labels=3)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"2": "good", "0": "bad", "1": "neutral"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).labels == ("bad", "neutral", "good")


def test_the_second_text_of_a_pair_has_its_own_type(tmp_path):
    folder = save("bert", tmp_path / "model", num_labels=2)
    pair, prompt = Pooling(second_from=4, activates=False), PROMPTS[3]
    found = vectors(engine_of(load(folder)), [prompt], pair)[0]
    assert float((found - own_scores(folder, prompt, 4)).abs().max()) < 1e-5
    assert float((found - own_scores(folder, prompt)).abs().max()) > 1e-3


def test_a_head_that_is_missing_is_refused(tmp_path):
    config, _ = CONFIGS["bert"]
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="lack"):
        load(tmp_path)
