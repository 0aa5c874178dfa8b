"""Gemma 3 from a GGUF file with K-quants: however a text is computed, its tokens are the same.

Needs the file of `make fetch-model MODEL=gemma3`, or another copy that QUIRE_TEST_GEMMA3 names. It
is under Google's Gemma terms of use: it is fetched for local tests and is no part of this project.
"""

import pytest

from engine.model.wide.gguf_header import read_header
from models.fetch import MODELS
from tests.engine.model.builders import generate
from tests.models.goldens import Subject
from tests.models.smollm2_chats import LONG_TEXT

GEMMA3 = MODELS["gemma3"]
FILE = GEMMA3.at_hand()
pytestmark = [
    pytest.mark.skipif(
        FILE is None,
        reason="Gemma 3 is not at hand: run `make fetch-model MODEL=gemma3`, or set "
        f"{GEMMA3.variable}",
    ),
    pytest.mark.timeout(1500),
]

#: As read off by hand: runs of spaces and tabs have tokens of their own, digits stand alone.
TOKENS = {
    "The meaning of life is": [2, 818, 6590, 529, 1972, 563],
    "  two  spaces\n\n\ttab 1234": [
        2, 138, 13498, 138, 35220, 108, 255968, 4823, 236743, 236770, 236778, 236800, 236812,
    ],
}  # fmt: skip
TEXTS = (
    "The meaning of life is",
    "def reverse(text: str) -> str:\n    ",
    "Die Hauptstadt von Österreich ist",
    "日本の首都は",
    "1, 1, 2, 3, 5, 8, 13,",
    # Longer than the window of 512 tokens.
    LONG_TEXT * 16 + "The book has a cover that is",
)
NUM_TOKENS = 10
#: Four of the short texts begin in one block of 16 tokens each, and one of them needs a second.
SCARCE_BLOCKS = 4


@pytest.fixture(scope="module")
def subject():
    def prompts_of(tokenizer):
        return [list(tokenizer.encode_prompt(text)) for text in TEXTS]

    return Subject(FILE, prompts_of, num_blocks=200, num_tokens=NUM_TOKENS)


def test_the_file_has_k_quants_and_the_prompts_exceed_the_window(subject):
    header = read_header(FILE)
    assert {12, 14} <= {tensor.ggml_type for tensor in header.tensors}
    window = header.metadata["gemma3.attention.sliding_window"]
    assert max(map(len, subject.prompts)) > window == 512
    assert len({tuple(tokens) for tokens in subject.expected.values()}) == len(TEXTS)


@pytest.mark.parametrize("text", TOKENS)
def test_texts_have_the_tokens_of_the_model(text, subject):
    assert list(subject.tokenizer.encode_prompt(text)) == TOKENS[text]
    assert subject.tokenizer.backend.decode(TOKENS[text], skip_special_tokens=True) == text


def test_alone_each_text_goes_on_as_in_generate(subject):
    for request in subject.requests():
        found = generate(subject.runner, [request]).tokens[request.request_id]
        assert found == subject.expected[request.request_id], TEXTS[int(request.request_id)]


def test_batched_is_alone(subject):
    assert generate(subject.runner, subject.requests()).tokens == subject.expected


def test_preempted_is_undisturbed(subject):
    short = subject.requests()[:5]
    found = generate(
        subject.runner,
        short,
        num_blocks=SCARCE_BLOCKS,
        preemption_mode="recompute",
        enable_prefix_caching=False,
    )
    assert found.snapshot.preemptions_recompute > 0
    assert found.tokens == {one.request_id: subject.expected[one.request_id] for one in short}


@pytest.mark.parametrize("published", [1, 6])
def test_resumed_is_uninterrupted(subject, published):
    found = generate(subject.runner, subject.requests(published=published)).tokens
    for name, tokens in found.items():
        assert tokens == subject.expected[name][published:]
