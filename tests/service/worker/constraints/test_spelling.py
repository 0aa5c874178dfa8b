"""Text that has to come is spelled in ordinary tokens, also where it is a control token's text."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.constraint import allows
from quire.client.client import Client
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import CompiledGrammars, load_grammars
from service.worker.model.served import load_model
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import Queue, WorkerThread
from tests.service.worker.constraints.test_constraints import needs_abacus

CONTROLS = ["<unk>", "<s>", "</s>", "<|end|>", "[PAD]"]
EOS_ID = CONTROLS.index("</s>")
WORDS = ["the", "bold", "word", "<b", "s>", "name"]


def with_merges(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The pieces that lead to some words, and how they are merged from the left."""
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    return ["".join(pair) for pair in merges], merges


@cache
def byte_level() -> Tokenizer:
    pieces, merges = with_merges(WORDS)
    symbols = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", *map(chr, range(33, 127))]


@cache
def merged_pieces() -> Tokenizer:
    pieces, merges = with_merges([*WORDS, "▁the"])
    symbols = dict.fromkeys([*CONTROLS, *BYTES, *LETTERS, *pieces])
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    model = models.BPE(
        vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    return sentence_pieces(model)


@cache
def likely_pieces() -> Tokenizer:
    """Its model itself has the control tokens, as pieces that are likelier than any other."""
    symbols = dict.fromkeys([*CONTROLS, *BYTES, *LETTERS, *WORDS, "▁the"])
    scores = [(one, 0.0 if one in CONTROLS else -float(1 + len(one) % 3)) for one in symbols]
    return sentence_pieces(models.Unigram(scores, unk_id=0, byte_fallback=True))


TOKENIZERS = {"byte": byte_level, "merged": merged_pieces, "likely": likely_pieces}


@cache
def grammars_of(name: str) -> CompiledGrammars:
    tokenizer = TOKENIZERS[name]()
    found = load_grammars(tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_ids={EOS_ID})
    assert isinstance(found, CompiledGrammars)
    return found


def generated(name: str, kind: Any, value: Any, *, seed: int, drafts: bool = False) -> list[int]:
    """Tokens at random of those that may come, guessed ones among them; each is a takeover."""
    grammars, chance, output = grammars_of(name), random.Random(seed), []
    wanted = Constraint(kind, value, f"body.{kind}")
    whole = grammars.constraint(wanted, [])
    while not whole.is_complete(output):
        bits = whole.allowed(output)
        assert bits.tolist() == grammars.constraint(wanted, output).allowed(output).tolist()
        found = [token_id for token_id in range(8 * len(bits)) if allows(bits, token_id)]
        assert found, whole.failure
        assert all(token_id == EOS_ID or token_id >= len(CONTROLS) for token_id in found)
        draft = list(whole.draft(output, [])) if drafts else []
        for count, token_id in enumerate(draft):
            ahead = whole.assuming(output, draft[:count])
            assert allows(ahead.allowed([*output, *draft[:count]]), token_id)
        output += draft or [chance.choice(found)]
        if output[-1] == EOS_ID:
            return output[:-1]
        assert len(output) < 200
    return output


def text_of(name: str, output: Sequence[int]) -> str:
    """The text of the tokens' own bytes: decoders may leave a space out at the beginning."""
    found: str = grammars_of(name)._tokenizer.decode_bytes(list(output)).decode()
    return found


TAGS = "<s>bold</s> the <|end|>[PAD]"
ASKED = {
    "a pattern": ("regex", "<s>", "<s>"),
    "an end": ("regex", "</s>", "</s>"),
    "a choice": ("choice", (TAGS,), TAGS),
    "a grammar": ("grammar", 'start: "<s>" /bold/ "</s>"', "<s>bold</s>"),
    "a constant": ("json_schema", {"const": TAGS}, json.dumps(TAGS)),
    "one of some": ("json_schema", {"enum": ["<unk>"]}, '"<unk>"'),
}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("kind", "value", "text"), ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_like_that_of_a_control_token_is_spelled(name, kind, value, text, drafts):
    for seed in range(4):
        output = generated(name, kind, value, seed=seed, drafts=drafts)
        assert text_of(name, output) == text


def test_a_key_that_is_a_control_token_of_the_model_is_spelled():
    schema = {
        "type": "object",
        "properties": {"<s>": {"const": "</s>"}},
        "required": ["<s>"],
        "additionalProperties": False,
    }
    output = generated("byte", "json_schema", schema, seed=1, drafts=True)
    assert json.loads(text_of("byte", output)) == {"<s>": "</s>"}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_forced_text_has_the_tokens_of_the_tokenizer_and_not_any_spelling(name):
    """A model that would rather say something else must not spell it letter by letter."""
    for seed in range(5):
        output = generated(name, "choice", ("boldname!",), seed=seed)
        words = [TOKENIZERS[name]().id_to_token(token_id) for token_id in output]
        assert words[0] == "bold" and len(words) == 3


def test_a_grammar_may_still_ask_for_a_control_token_by_its_name():
    grammars = grammars_of("byte")
    rule = grammars.constraint(Constraint("grammar", "start: <s> /a/", "body.grammar"), [])
    bits = rule.allowed([])
    found = [token_id for token_id in range(8 * len(bits)) if allows(bits, token_id)]
    assert found == [CONTROLS.index("<s>")]


@needs_abacus
@pytest.mark.parametrize("guesses", [0, 4])
def test_the_embedded_model_says_the_letters_of_its_own_control_tokens(queue: Queue, guesses: int):
    settings = queue.settings(
        model=str(EMBEDDED_MODEL), device="cpu", num_speculative_tokens=guesses
    )
    asked: list[dict[str, Any]] = [
        {"regex": "<eos>"},
        {"regex": "<pad>"},
        {"choice": ["<bos><eos>"]},
        {"json_schema": {"const": "<eos>"}},
    ]
    with (
        WorkerThread(settings, load=load_model),
        Client(queue.url, queue=queue.name) as client,
    ):
        handles = [client.submit("1+1=", sampling={"max_tokens": 40} | one) for one in asked]
        found = [handle.result(timeout=60) for handle in handles]
    assert [one.text for one in found] == ["<eos>", "<pad>", "<bos><eos>", '"<eos>"']
    assert {str(one.finish_reason) for one in found} <= {"stop", "eos"}
