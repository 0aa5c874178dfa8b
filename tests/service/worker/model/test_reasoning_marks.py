"""The text of a chat says where its reasoning begins and ends, whatever the template does."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.sampling_params import SamplingParams
from service.worker.model.text import ModelTokenizer
from tests.service.chat_models import FAMILIES
from tests.service.worker.constraints.called import FAMILIES as FAMILIES_OF_CALLS

ASK = [{"role": "user", "content": "Is it warm?"}]
#: Opens the reasoning in the prompt, unless the caller switches it off; reads earlier reasoning.
THINKS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
    {{- '\\n</think>\\n\\n' }}
{%- endif %}"""


def loaded(folder: Path, template: str, added: list[AddedToken]) -> ModelTokenizer:
    family = FAMILIES["Qwen"]
    tokenizer = family.tokenizer()
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **family.settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"chat_template": template}))
    return ModelTokenizer.load(str(folder))


def said(model: ModelTokenizer, text: str, **settings: Any) -> str:
    """What a generation of this text becomes. Each token is fed by itself."""
    skips = settings.pop("skip_special_tokens", True)
    sampling = SamplingParams(max_tokens=100, seed=0, skip_special_tokens=skips)
    stream = model.text_stream(sampling, prompt=[], **settings)
    pieces = []
    for token_id in model.backend.encode(text, add_special_tokens=False).ids:
        stream.append(token_id)
        pieces.append(stream.take_text(final=False))
    return "".join(pieces) + stream.take_text(final=True)


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_a_prompt_that_opens_the_reasoning_is_noticed(tmp_path: Path, kind: str) -> None:
    names = ["<think>", "</think>"] if kind != "text" else []
    added = [AddedToken(name, special=kind == "special") for name in names]
    model = loaded(tmp_path, THINKS, added)
    assert model.encode_chat(ASK, created_ms=0).opening == "<think>"
    arguments = {"enable_thinking": False}
    assert model.encode_chat(ASK, created_ms=0, arguments=arguments).opening == ""


def test_a_mark_in_a_message_opens_nothing(tmp_path: Path) -> None:
    model = loaded(tmp_path, FAMILIES["ChatML"].settings["chat_template"], [])
    asked = [{"role": "user", "content": "Write <think>"}]
    assert model.encode_chat(asked, created_ms=0).opening == ""


def test_the_opening_stands_before_the_text_and_is_not_searched(tmp_path: Path) -> None:
    model = loaded(tmp_path, THINKS, [])
    assert said(model, "a b", opening="<think>") == "<think>a b"
    stream = model.text_stream(
        SamplingParams(max_tokens=100, seed=0, stop=("think",)), prompt=[], opening="<think>"
    )
    assert stream.take_text(final=False) == ""
    assert not stream.append(model.backend.encode("a").ids[0])
    assert stream.take_text(final=True) == "<think>a"
    assert stream.take_text(final=True) == ""


def test_marks_that_are_special_tokens_keep_their_text(tmp_path: Path) -> None:
    added = [AddedToken(name, special=True) for name in ("[THINK]", "[/THINK]", "[OTHER]")]
    model = loaded(tmp_path, THINKS, added)
    text = "[THINK]a[OTHER]b[/THINK]c"
    assert said(model, text, keeps_marks=True) == "[THINK]ab[/THINK]c"
    assert said(model, text) == "abc"
    assert said(model, text, keeps_marks=True, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", FAMILIES_OF_CALLS)
def test_marks_of_calls_keep_their_text_beside_the_end_that_has_none(
    tmp_path: Path, name: str
) -> None:
    """The end of the output is a special token, too, and no content."""
    family = FAMILIES_OF_CALLS[name]
    model = loaded(tmp_path, THINKS, [AddedToken(one, special=True) for one in family.special])
    call = family.write("now", {})
    assert said(model, f"{call}<|im_end|>", keeps_marks=True, keeps_calls=True) == call
    assert said(model, f"{call}<|im_end|>", skip_special_tokens=False) == f"{call}<|im_end|>"


def test_reasoning_of_a_message_reaches_the_template(tmp_path: Path) -> None:
    model = loaded(tmp_path, THINKS, [])

    def ids(**more: Any) -> list[int]:
        messages = [*ASK, {"role": "assistant", "content": "Yes.", **more}, *ASK]
        return list(model.encode_chat(messages, created_ms=0).token_ids)

    with_reasoning = model.backend.decode(ids(reasoning_content="Why not."))
    assert "<think>\nWhy not.\n</think>" in with_reasoning
    assert "Why not." not in model.backend.decode(ids())
