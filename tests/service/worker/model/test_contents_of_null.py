"""A message of the assistant without a text: null to a template that asks, else an empty text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from service.worker.model.text import ModelTokenizer
from tests.service.chat_models import FAMILIES

#: Writes calls only of messages whose content is null, and a text only of others.
ASKS = """{%- for message in messages %}
    {%- if message.role == 'assistant' and message.content IS_NULL %}
        {%- for call in message.tool_calls %}{{- '<call>' ~ call.function.name }}{%- endfor %}
    {%- elif message.role == 'assistant' and message.content IS_TEXT %}
        {{- '<|im_start|>said:' + message.content }}
    {%- else %}
        {{- '<|im_start|>' + message.role + ':' + message.content }}
    {%- endif %}
{%- endfor %}"""
#: Writes the content of every message, in one of several ways, and then the calls.
WRITES = """{% for message in messages %}{{- '<|im_start|>' }}WRITING
    {%- for call in message.tool_calls or [] %}{{- '<call>' ~ call.function.name }}{%- endfor %}
{% endfor %}"""
ASKING = [("is none", "is not none"), ("== none", "!= none"), ("in [none]", "not in [none]")]
WRITING = [
    "{{ message.role + ':' + message['content'] }}",
    "{{ message.role ~ ':' ~ message.content }}",
    "{{ message.content }}",
    "{{ message.content | trim }}",
    "{{ message.content.strip() }}",
    "{{ message.content if message.content is string else message.content[0].text }}",
    "{% set content = message.content %}{% if content %}{{ ':' + content }}{% endif %}",
]

ASK = {"role": "user", "content": "Is it warm?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TEXT = {"role": "assistant", "content": "It is."}
CHATS = [[ASK, SAID, {"role": "tool", "content": "31"}], [ASK, TEXT, ASK, SAID], [ASK, SAID, TEXT]]

AUTHORS = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

Save = Callable[[str], tuple[ModelTokenizer, Any]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """The tokenizer of a model with this template, and the library's."""

    def saved(template: str) -> tuple[ModelTokenizer, Any]:
        family = FAMILIES["ChatML"]
        family.tokenizer().save(str(tmp_path / "tokenizer.json"))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", **family.settings}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(facts | {"chat_template": template})
        )
        return ModelTokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)

    return saved


def library_ids(library: Any, messages: list[Any]) -> list[int]:
    return list(library.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])


def with_empty_text(messages: list[Any]) -> list[Any]:
    return [one | {"content": ""} if one["content"] is None else one for one in messages]


@pytest.mark.parametrize(("is_null", "is_text"), ASKING)
def test_a_template_that_asks_for_null_finds_it(save: Save, is_null: str, is_text: str) -> None:
    template = ASKS.replace("IS_NULL", is_null).replace("IS_TEXT", is_text)
    model, library = save(template)
    for messages in CHATS:
        prompt = model.encode_chat(messages, created_ms=0)
        text = model.backend.decode(prompt.token_ids, skip_special_tokens=False)
        assert "<call>weather" in text
        # The library leaves null out, so that such a template fails. Its author had it.
        assert text == AUTHORS.from_string(template).render(messages=messages)
        assert prompt.is_changed
    # The control: an empty text is none of the caller's nulls.
    empty = with_empty_text(CHATS[0])
    prompt = model.encode_chat(empty, created_ms=0)
    assert list(prompt.token_ids) == library_ids(library, empty)
    assert "<call>" not in model.backend.decode(prompt.token_ids)
    assert not prompt.is_changed


@pytest.mark.parametrize("writing", WRITING)
def test_a_template_that_writes_the_content_writes_nothing(save: Save, writing: str) -> None:
    model, library = save(WRITES.replace("WRITING", writing))
    for messages in CHATS:
        prompt = model.encode_chat(messages, created_ms=0)
        assert list(prompt.token_ids) == library_ids(library, with_empty_text(messages))
        assert "<call>weather" in model.backend.decode(prompt.token_ids)
        assert not prompt.is_changed
