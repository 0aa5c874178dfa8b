"""The stored model of abacus: it loads, is small and answers; its tokenizer loses nothing."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, TokenizersBackend

from models.abacus.architecture import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    MAX_POSITIONS,
    PAD,
    PAD_ID,
    encode_document,
)
from models.abacus.evaluate import answer_greedily, held_out_prompts
from models.abacus.forward import hidden_states, logits
from models.abacus.tasks import TASKS, Example, answer, check

FOLDER = Path(__file__).parents[2] / "models" / "abacus"
#: What a clone of the repository pays for the model.
MAX_FOLDER_BYTES = 8_000_000
#: Prompts of each task that a test run decodes; models/abacus/evaluate.py measures a thousand.
SAMPLE = 20
LEAST_RIGHT = 0.95

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
STORED_TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> TokenizersBackend:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize("task", TASKS)
def test_held_out_prompts_are_answered_exactly(
    task: str, model: LlamaForCausalLM, tokenizer: TokenizersBackend
) -> None:
    prompts = held_out_prompts(task, SAMPLE, seed=1)
    texts = answer_greedily(model, tokenizer, prompts)
    right = sum(map(check, prompts, texts))
    assert right >= LEAST_RIGHT * SAMPLE


def test_the_prompts_of_the_documentation_are_answered_exactly(
    model: LlamaForCausalLM, tokenizer: TokenizersBackend
) -> None:
    prompts = [
        "12+34=",
        "reverse: quire=",
        "sort: 31 4 15=",
        "count: 7 to 12=",
        "json: a=1 name=bob=",
    ]
    texts = answer_greedily(model, tokenizer, prompts)
    assert texts == [answer(prompt) for prompt in prompts]


def test_the_folder_stays_below_eight_megabytes() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < MAX_FOLDER_BYTES


def test_the_configuration_shares_key_value_heads_and_reaches_far_enough(
    model: LlamaForCausalLM,
) -> None:
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert 1 < model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == MAX_POSITIONS >= 1024
    assert model.generation_config.eos_token_id == EOS_ID
    assert not model.generation_config.do_sample


@given(text=TEXTS)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = STORED_TOKENIZER.encode(text, add_special_tokens=False).ids
    assert STORED_TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(text=TEXTS.filter(lambda text: not any(special in text for special in (BOS, EOS, PAD))))
def test_the_tokens_of_a_text_are_its_bytes(text: str) -> None:
    assert STORED_TOKENIZER.encode(text, add_special_tokens=False).ids == list(text.encode())


def test_a_prompt_is_encoded_as_in_training(tokenizer: TokenizersBackend) -> None:
    ids, answer_start = encode_document(Example("12+34=", "46"))
    assert tokenizer("12+34=")["input_ids"] == ids[:answer_start]
    assert ids[0] == BOS_ID
    assert ids[-1] == EOS_ID
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert (tokenizer.pad_token_id, tokenizer.padding_side) == (PAD_ID, "left")


@pytest.mark.parametrize("content", ["12+34=", "12+34", " 12+34= "])
def test_a_chat_becomes_the_prompt_of_its_last_user_message(
    content: str, tokenizer: TokenizersBackend
) -> None:
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": content},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<bos>12+34="


def test_the_training_forward_computes_what_the_model_computes(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.abacus.forward.COMPUTE_DTYPE", torch.float32)
    ids = torch.tensor(
        [[BOS_ID, *b"12+34=46", EOS_ID], [BOS_ID, *b"9+9=18", EOS_ID, PAD_ID, PAD_ID]]
    )
    with torch.inference_mode():
        expected = model(ids).logits
        actual = logits(model, hidden_states(model, ids))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
