"""What a token says by itself, and what prompts and chats become that a model's files describe."""

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.logprobs import Logprobs
from engine.output.detokenizer import REPLACEMENT
from quire.wire.logprobs import TokenLogprob, TopLogprob
from service.worker.model.encoding import encoded
from service.worker.model.text import ModelTokenizer
from tests.service.fake_model import EOS_ID, VOCAB_SIZE, byte_tokenizer, eventually


def words(*vocabulary: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(vocabulary)}


def marked_spaces() -> Tokenizer:
    """A space is a mark before its word, and a text does not begin with one."""
    tokenizer = Tokenizer(models.BPE(words("a", "▁the", "re"), []))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces_of_words() -> Tokenizer:
    """What goes on inside a word has the mark, as BERT writes it."""
    tokenizer = Tokenizer(models.WordPiece(words("[UNK]", "a", "the", "##re")))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "texts"),
    [(marked_spaces(), ["a", " the", "re"]), (pieces_of_words(), [" [UNK]", " a", " the", "re"])],
    ids=["marked spaces", "pieces of words"],
)
def test_a_token_says_what_it_adds_to_a_text(tokenizer: Tokenizer, texts: list[str]):
    model = ModelTokenizer(tokenizer)
    assert [model.text_of(token_id) for token_id in range(len(texts))] == texts


def test_bytes_of_a_character_say_that_they_are_none_and_special_tokens_say_their_names():
    model = ModelTokenizer(byte_tokenizer())
    euro = byte_tokenizer().encode("€", add_special_tokens=False).ids
    assert [model.text_of(token_id) for token_id in euro] == [REPLACEMENT] * 3
    assert model.text_of(EOS_ID) == "<eos>"


def test_an_id_without_a_token_says_nothing():
    model = ModelTokenizer(byte_tokenizer())
    assert [model.text_of(VOCAB_SIZE), model.text_of(1 << 31)] == ["", ""]


def test_what_the_engine_says_of_a_token_is_told_with_texts():
    model = ModelTokenizer(marked_spaces())
    assert model.with_texts(2, Logprobs(-1.5, ((1, -0.5), (2, -1.5)))) == TokenLogprob(
        2, -1.5, "re", (TopLogprob(1, -0.5, " the"), TopLogprob(2, -1.5, "re"))
    )


def told_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return ModelTokenizer(tokenizer).with_texts(token_id, Logprobs(-1.0)).raw


def test_a_part_of_a_character_is_told_with_its_bytes():
    tokenizer = byte_tokenizer()
    euro = tokenizer.encode("€", add_special_tokens=False).ids
    assert [told_bytes(tokenizer, one) for one in euro] == [b"\xe2", b"\x82", b"\xac"]
    assert told_bytes(tokenizer, tokenizer.token_to_id("a")) == b""
    # A fallback, a token of its own for the replacement character, and one that tells nothing.
    fallback = Tokenizer(models.BPE(words("<0xE2>", REPLACEMENT, "x\ufffd\u4e00"), []))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert [told_bytes(fallback, one) for one in range(3)] == [b"\xe2", b"", b""]


DATED = "{{ strftime_now('%d %B %Y %H:%M') }}{% for m in messages %}|{{ m.content }}{% endfor %}"


def folder_of(path: Path, tokenizer: Tokenizer, **settings: object) -> str:
    """The files of a tokenizer, as a model brings them."""
    tokenizer.save(str(path / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    return str(path)


def test_a_template_that_tells_the_date_tells_that_of_the_chat(tmp_path: Path):
    model = ModelTokenizer.load(folder_of(tmp_path, byte_tokenizer(), chat_template=DATED))
    hello = [{"role": "user", "content": "hello"}]
    for created_ms, date in (
        (0, "01 January 1970 00:00"),
        (1_600_000_020_000, "13 September 2020 12:27"),
    ):
        ids = model.encode_chat(hello, created_ms=created_ms).token_ids
        assert ids == byte_tokenizer().encode(f"{date}|hello", add_special_tokens=False).ids


def test_a_prompt_is_taken_whole_whatever_lengths_the_tokenizer_was_trained_with(tmp_path: Path):
    trained = Tokenizer.from_str(byte_tokenizer().to_str())
    trained.enable_truncation(16)
    trained.enable_padding(length=24)
    model = ModelTokenizer.load(folder_of(tmp_path, trained))
    for prompt in ("a" * 100, "a"):
        assert model.encode_prompt(prompt) == byte_tokenizer().encode(prompt).ids


LONG_TEXT = "count 9 " * (1 << 15)


@pytest.mark.parametrize("text", ["", "a", " a  b\n", "<eos>", "\u00e9\U0001f642", LONG_TEXT[:999]])
@pytest.mark.parametrize("special", [True, False])
def test_the_ids_of_a_text_are_those_that_the_library_gives_one_text(text: str, special: bool):
    tokenizer = byte_tokenizer()
    found = encoded(tokenizer, text, add_special_tokens=special)
    assert found == tokenizer.encode(text, add_special_tokens=special).ids


def test_other_threads_go_on_while_a_long_prompt_is_encoded():
    turns, stop = [0], threading.Event()

    def turn() -> None:
        while not stop.wait(0.001):
            turns[0] += 1

    tokenizer = ModelTokenizer(byte_tokenizer())
    thread = threading.Thread(target=turn)
    thread.start()
    eventually(lambda: turns[0] > 0)
    before = turns[0]
    tokenizer.encode_prompt(LONG_TEXT)
    found = turns[0] - before
    stop.set()
    thread.join()
    # With the interpreter's lock kept there are one or two, however long it takes.
    assert found >= 10
