"""How a caller says that the template renders: the ids are those of the library."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.errors import InvalidRequest
from service.worker.model.text import ModelTokenizer
from tests.service.chat_models import FAMILIES

ASK = [{"role": "user", "content": "Is it warm?"}]
SAID = {"role": "assistant", "content": "It is <|im_end|> as warm as"}
READS = """{%- for document in documents or [] %}{{- document.text }}{%- endfor %}
{{- reasoning_effort or '' }}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    family = FAMILIES["ChatML"]
    plain = family.settings["chat_template"]
    made = {}
    for name, template in {"plain": plain, "reading": READS + plain}.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        family.tokenizer().save(str(folder / "tokenizer.json"))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", **family.settings}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(facts | {"chat_template": template})
        )
    return made


def library_ids(folder: Path, messages: list[Any], **settings: Any) -> list[int]:
    library = AutoTokenizer.from_pretrained(folder)
    told = library.apply_chat_template(messages, tokenize=True, return_dict=True, **settings)
    return list(told["input_ids"])


@pytest.mark.parametrize(
    ("name", "messages", "settings"),
    [
        ("plain", ASK, {"add_generation_prompt": False}),
        ("reading", ASK, {"documents": [{"text": "It is 31 degrees."}]}),
        ("reading", ASK, {"reasoning_effort": "low"}),
        ("plain", [*ASK, {"role": "assistant", "content": "It is "}],
         {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)  # fmt: skip
def test_the_ids_are_those_of_the_library(
    folders: dict[str, Path], name: str, messages: list[Any], settings: dict[str, Any]
) -> None:
    model = ModelTokenizer.load(str(folders[name]))
    ids = list(model.encode_chat(messages, created_ms=0, settings=settings).token_ids)
    given = {"add_generation_prompt": True} | settings
    assert ids == library_ids(folders[name], messages, **given)
    assert ids != list(model.encode_chat(messages, created_ms=0).token_ids)


def test_a_message_that_goes_on_stays_text(folders: dict[str, Path]) -> None:
    model = ModelTokenizer.load(str(folders["plain"]))
    settings = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = model.encode_chat([*ASK, SAID], created_ms=0, settings=settings)
    assert model.backend.decode(prompt.token_ids).endswith("as warm as")
    end = model.backend.token_to_id("<|im_end|>")
    assert prompt.token_ids.count(end) == model.encode_chat(ASK, created_ms=0).token_ids.count(end)


@pytest.mark.parametrize("name", ["documents", "reasoning_effort"])
def test_what_the_template_does_not_read_is_refused(folders: dict[str, Path], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ModelTokenizer.load(str(folders["plain"])).encode_chat(
            ASK, created_ms=0, settings={name: "low"}
        )
    assert str(caught.value).startswith(f"body.{name}: this model's chat template knows no ")
