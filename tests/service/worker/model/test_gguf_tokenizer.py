"""The tokenizer, the chat template and the end tokens of a GGUF file."""

import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelRefused
from service.worker.model.text import ModelTokenizer
from tests.engine.model.gguf_files import TOKENS, tiny_model, write_gguf


@pytest.fixture
def write(tmp_path):
    def written(**more):
        return str(write_gguf(tiny_model("llama"), tmp_path / "m.gguf", kind=Type.F16, more=more))

    return written


def pieces(tokenizer: ModelTokenizer, text: str) -> list[str]:
    return [TOKENS[id_] for id_ in tokenizer.encode_prompt(text)]


def test_the_vocabulary_and_the_merges_are_those_of_the_file(write):
    tokenizer = ModelTokenizer.load(write())
    assert pieces(tokenizer, "in the é") == ["in", "Ġth", "e", "Ġ", "Ã", "©"]
    assert pieces(tokenizer, "<|im_end|>") == ["<|im_end|>"]


def test_the_tokenizer_of_a_split_model_is_in_its_first_part(tmp_path):
    first = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", tensors_in_a_part=5)
    assert pieces(ModelTokenizer.load(str(first)), "in the") == ["in", "Ġth", "e"]


def test_a_chat_is_rendered_by_the_files_template_and_only_that_writes_control_tokens(write):
    tokenizer = ModelTokenizer.load(write())
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    prompt = tokenizer.encode_chat(messages, created_ms=0)
    control = [TOKENS[id_] for id_ in prompt.token_ids if id_ < 3]
    assert control == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert prompt.is_changed
    assert tokenizer.backend.decode(prompt.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_neighbouring_template_is_not_read(write, tmp_path):
    file = write()
    (tmp_path / "chat_template.jinja").write_text("other")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    prompt = ModelTokenizer.load(file).encode_chat([{"role": "user", "content": "x"}], created_ms=0)
    assert len(prompt.token_ids) > 10


@pytest.mark.parametrize(
    ("split", "expected"),
    [("gpt-2", ["a", "Ġ", "Ġ", "4", "2"]), ("smollm", ["a", "ĠĠ", "4", "2"])],
)
def test_digits_are_split_first_where_the_model_was_trained_so(split, expected, write):
    tokens = [*TOKENS[:-1], "ĠĠ"]
    more = {
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["t h", "i n", "Ġ t", "Ġ Ġ"],
    }
    tokenizer = ModelTokenizer.load(write(**more))
    assert [tokens[id_] for id_ in tokenizer.encode_prompt("a  42")] == expected


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tokenizer.ggml.pre", "martian", "its tokenizer.ggml.pre is 'martian'"),
        ("tokenizer.ggml.model", "rwkv", "'rwkv'"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused_by_name(key, value, reason, write):
    with pytest.raises(ModelRefused, match=reason):
        ModelTokenizer.load(write(**{key: value}))
