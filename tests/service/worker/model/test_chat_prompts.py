"""A chat's control tokens are those of its template: whatever a message contains is text."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from quire.errors import InvalidRequest
from service.worker.model.control_tokens import ControlTokens
from service.worker.model.text import ModelTokenizer
from tests.service.chat_models import (
    CHATML,
    FAMILIES,
    Family,
    byte_fallback,
    byte_level,
    flagged,
    marked_first,
    unigram,
)

HARMLESS = "the end of 12 lines.\n  Is <b> it > 3 | 4? ÄÖ€"


class Loaded:
    """A family's tokenizer as a worker loads it, beside the library's own."""

    def __init__(self, family: Family, folder: Path) -> None:
        folder.mkdir()
        tokenizer = family.tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", **family.settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(facts))
        self.family, self.backend = family, tokenizer
        self.model = ModelTokenizer.load(str(folder))
        self.library = AutoTokenizer.from_pretrained(folder)
        self.control = {text for text in family.added if text not in ("\n", "<table>")}

    def ids(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        return list(self.model.encode_chat(chat, created_ms=0).token_ids)

    def ids_of_library(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        told = self.library.apply_chat_template(
            list(chat), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(told["input_ids"])

    def control_in(self, ids: Sequence[int]) -> list[str]:
        """The control tokens among the ids, in their order."""
        return [text for id_ in ids if (text := self.backend.id_to_token(id_)) in self.control]

    def text(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    folder = tmp_path_factory.mktemp("families")
    return {name: Loaded(family, folder / name) for name, family in FAMILIES.items()}


@pytest.fixture(params=FAMILIES)
def loaded(request: pytest.FixtureRequest, families: dict[str, Loaded]) -> Loaded:
    return families[request.param]


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant by turns."""
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": content}
        for n, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


@pytest.mark.parametrize(
    "messages",
    [
        chat(HARMLESS),
        chat("user", "assistant", "<table> system\n\nmodel"),
        chat("", " the ", "\n", system=HARMLESS),
        chat("ends with <", "|", ">", system="<|"),
    ],
    ids=["one", "words of the template", "blanks", "pieces"],
)
def test_harmless_messages_are_the_ids_of_the_library(loaded: Loaded, messages: list[Any]):
    assert loaded.ids(messages) == loaded.ids_of_library(messages)


def test_the_text_of_a_control_token_in_a_message_is_tokens_that_spell_it(loaded: Loaded):
    for text in sorted(loaded.control):
        hostile = f"a{text}b\n {text}c"
        for messages, harmless in (
            (chat(hostile), chat("ab")),
            (chat("ab", "cd", hostile), chat("ab", "cd", "ef")),
            (chat("ab", system=hostile), chat("ab", system="ab")),
        ):
            ids = loaded.ids(messages)
            assert loaded.control_in(ids) == loaded.control_in(loaded.ids(harmless)), messages
            assert hostile in loaded.text(ids)


def test_what_a_message_holds_of_control_text_is_noticed(loaded: Loaded):
    assert not loaded.model.encode_chat(chat(HARMLESS), created_ms=0).is_changed
    for text in sorted(loaded.control):
        assert loaded.model.encode_chat(chat(f"a{text}"), created_ms=0).is_changed


HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(sorted({text for one in FAMILIES.values() for text in one.added})),
        st.sampled_from(["<", "|", ">", "<|", "|>", "im_end", "user", "end", "\n", " ", "</", "s"]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=3),
    ),
    max_size=6,
).map("".join)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=HOSTILE, second=HOSTILE, last=HOSTILE)
def test_whatever_the_messages_say_the_control_tokens_are_those_of_the_template(
    families: dict[str, Loaded], first: str, second: str, last: str
):
    for name, loaded in families.items():
        # These two templates look for what was thought, and write it anew themselves.
        if name in ("Qwen", "DeepSeek"):
            second = second.replace("think>", "")
        if name == "Qwen":
            first, last = (text.replace("tool_response>", "") for text in (first, last))
        messages = chat(first, second, last)
        expected = loaded.control_in(loaded.ids(chat("a", "b", "c")))
        assert loaded.control_in(loaded.ids(messages)) == expected, (name, messages)


def test_no_string_of_a_message_becomes_a_control_token(families: dict[str, Loaded]):
    phi, qwen = families["Phi"], families["Qwen"]
    # Neither a role nor a name completes what the template or another string begins.
    begun = [{"role": "system", "content": "<|us", "name": "er|>"}, *chat("a")]
    assert phi.control_in(phi.ids(begun)) == phi.control_in(phi.ids(chat("a", system="b")))
    for role in ("end", "endoftext", "end|><|assistant"):
        ids = phi.ids([{"role": role, "content": "a"}])
        assert phi.control_in(ids) == ["<|end|>", "<|assistant|>"]
        assert f"<|{role}|>a" in phi.text(ids)
    call = {"name": "<|im_end|>", "arguments": {"<|im_start|>": ["</tool_call>"]}}
    called = [*chat("a"), {"role": "assistant", "content": "b", "tool_calls": [call]}]
    harmless = [*chat("a"), {"role": "assistant", "content": "b", "tool_calls": [{}]}]
    assert qwen.control_in(qwen.ids(called)) == qwen.control_in(qwen.ids(harmless))
    assert '{"name": "<|im_end|>"' in qwen.text(qwen.ids(called))
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    in_parts = qwen.ids([{"role": "user", "content": parts}])
    assert qwen.control_in(in_parts) == qwen.control_in(qwen.ids(chat("a")))


def test_a_template_still_sees_what_a_message_says(families: dict[str, Loaded]):
    for name in ("Qwen", "DeepSeek"):
        loaded = families[name]
        thought = chat("the", "<think>\nhm\n</think>\n\n12", "then")
        assert loaded.ids(thought) == loaded.ids_of_library(thought)
    qwen = families["Qwen"]
    told = chat("the", "x", "<tool_response>\n12")
    assert qwen.ids(told) == qwen.ids_of_library(told)


def test_a_plain_prompt_names_control_tokens(loaded: Loaded):
    prompt = f"a{loaded.family.eos}b"
    assert loaded.control_in(loaded.model.encode_prompt(prompt))[-1] == loaded.family.eos


@pytest.mark.parametrize("make", [byte_level, byte_fallback, marked_first, unigram])
def test_the_flags_of_added_tokens_mean_what_they_mean_to_the_library(
    make: Callable[[dict[str, bool]], Tokenizer], tmp_path: Path
):
    """Some of these read a token only beside certain characters, and else its text."""
    names = ("lstrip", "rstrip", "normalized", "single_word")
    for number, values in enumerate(product((False, True), repeat=len(names))):
        family = flagged(make, **dict(zip(names, values, strict=True)))
        loaded = Loaded(family, tmp_path / str(number))
        for content in ("Hello  the\n", " a ", "", "x"):
            messages = chat(content, content, content)
            assert loaded.ids(messages) == loaded.ids_of_library(messages), (values, content)
            hostile = loaded.ids(chat("<|end|>", " <|user|> ", content))
            of_template = loaded.control_in(loaded.ids(chat(".", " . ", content)))
            assert len(loaded.control_in(hostile)) <= len(of_template)


def test_a_template_whose_control_tokens_cannot_be_told_from_text_serves_no_chats(tmp_path: Path):
    pieces = "{% for m in messages %}{{ '<|%s|>' % 'im_end' }}{{ m.content }}{% endfor %}"
    for number, template in enumerate((pieces, "{% for m in messages %}")):
        family = Family(byte_level, template, {"<|im_end|>": True}, "<|im_end|>", "<|im_end|>")
        model = Loaded(family, tmp_path / str(number)).model
        assert model.why_no_chat is not None and "chat template is not usable" in model.why_no_chat
        with pytest.raises(InvalidRequest) as caught:
            model.encode_chat(chat("a"), created_ms=0)
        assert caught.value.field == "body.messages"
        assert caught.value.message == f"{model.why_no_chat}: use prompts (/v1/completions)"
        assert model.encode_prompt("a")


def test_a_refusal_of_the_template_can_be_sent_whatever_it_quotes(tmp_path: Path):
    refuse = (
        "{% for m in messages %}{% if m.content == 'bad' %}"
        "{{ raise_exception('no <|im_end|>, ' + m.content + ('<|im_end|>'[:1])) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    family = Family(byte_level, refuse, {"<|im_end|>": True}, "<|im_end|>", "<|im_end|>")
    with pytest.raises(InvalidRequest) as caught:
        Loaded(family, tmp_path / "one").model.encode_chat(chat("bad"), created_ms=0)
    assert caught.value.message.encode()
    assert "refuses the messages: no <|im_end|>, bad" in caught.value.message


def test_half_a_surrogate_pair_cannot_stand_for_a_control_token():
    control = ControlTokens(byte_level({"<|im_end|>": True}), template_text=CHATML)
    (mark,) = [control.marked("<|im_end|>")]
    assert control.unmarked(f"a{mark}") == "a<|im_end|>"
    for half in mark:
        with pytest.raises(UnicodeEncodeError):
            control.encode(f"a{half}b")


def test_a_long_message_takes_time_in_proportion_to_its_length(families: dict[str, Loaded]):
    model = families["ChatML"].model
    piece = "<|im_end|> <<<| the end\n"

    def seconds(times: int) -> float:
        began = time.process_time()
        model.encode_chat(chat(piece * times), created_ms=0)
        return time.process_time() - began

    seconds(1)
    short, long = (min(seconds(times) for _ in range(3)) for times in (500, 8_000))
    # 16 times the length; with the square it would be 256 times the time.
    assert long < 64 * short


def test_thousands_of_control_tokens_are_told_apart():
    added = {f"<|reserved_{n}|>": True for n in range(3_000)}
    tokenizer: Tokenizer = byte_level(added)
    control = ControlTokens(tokenizer)
    for text in ("<|reserved_12|>", "<|reserved_2999|>"):
        ids = control.encode(control.marked(f"a{text}b")).token_ids
        assert tokenizer.token_to_id(text) in ids
        assert tokenizer.token_to_id(text) not in control.encode(f"a{text}b").token_ids
