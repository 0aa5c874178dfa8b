"""The text of an output is what decoding it together with its prompt adds to the prompt's own."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from engine.output.detokenizer import MAX_WINDOW_TOKENS, REPLACEMENT, StreamDecoder

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "the answer to the question is the answer",
    "a naïve café 漢字 and the rest of the text",
] * 4
SPECIAL = [AddedToken(text, special=True) for text in ("<s>", "</s>")]


def trained(tokenizer: Tokenizer, **options) -> Tokenizer:
    """With merges of its own; special tokens come first."""
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False, min_frequency=1, **options
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """A space is a mark before its word, and the first word has one that is not written."""
    tokenizer = Tokenizer(models.BPE(unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return trained(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Llama 2 writes it: marks, single bytes for what has no token, one leading space cut."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for text in ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the"):
        vocabulary[text] = len(vocabulary)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """A token for each byte."""
    return {byte: id_ for id_, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def byte_level() -> Tokenizer:
    """The alphabet of bytes, as GPT-2 writes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


TOKENIZERS = {
    "metaspace": metaspace(),
    "byte fallback": byte_fallback(),
    "byte level": byte_level(),
}


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True, prompt=prompt)
    return "".join([*(decoder.step(id_) or "" for id_ in output), decoder.rest()])


def added(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """The law: what the output adds to the text of its prompt."""
    return tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("name", ["metaspace", "byte fallback"])
def test_the_first_word_of_an_output_keeps_its_space(name: str):
    tokenizer = TOKENIZERS[name]
    prompt, output = tokenizer.encode("the fox").ids, tokenizer.encode("the dog").ids
    assert streamed(tokenizer, prompt, output) == " the dog"
    # With nothing before it there is no space to keep.
    assert streamed(tokenizer, [], output) == "the dog"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@example(text="the 漢字 the", cut=3, specials=[0])
@example(text="eé..", cut=3, specials=[])
@example(text="  the  the", cut=1, specials=[1, 2])
@example(text="é😀😀", cut=10, specials=[])
@given(
    text=st.text(st.sampled_from("the é漢😀z."), min_size=1, max_size=30),
    cut=st.integers(0, 60),
    specials=st.lists(st.integers(0, 60), max_size=3),
)
def test_text_is_what_the_output_adds_to_the_prompt_wherever_the_prompt_ends(
    name: str, text: str, cut: int, specials: list[int]
):
    tokenizer = TOKENIZERS[name]
    ids = list(tokenizer.encode(text).ids)
    for place in specials:
        # In the middle of a run of bytes even a whole decode would see other characters.
        if name != "byte fallback":
            ids.insert(min(place, len(ids)), tokenizer.token_to_id("</s>"))
    prompt, output = ids[:cut], ids[cut:]
    assert streamed(tokenizer, prompt, output) == added(tokenizer, prompt, output)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_that_ends_in_tokens_without_text_is_looked_at_further_back(name: str):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("the fox").ids + 40 * [tokenizer.token_to_id("</s>")]
    output = tokenizer.encode("the dog").ids
    assert streamed(tokenizer, prompt, output) == added(tokenizer, prompt, output)


@pytest.mark.parametrize("name", ["byte fallback", "byte level"])
def test_behind_a_long_prompt_without_text_a_character_is_still_given_out_whole(name: str):
    tokenizer = TOKENIZERS[name]
    prompt = 2 * MAX_WINDOW_TOKENS * [tokenizer.token_to_id("</s>")]
    output = tokenizer.encode("😀").ids
    assert len(output) > 1
    assert streamed(tokenizer, prompt, output) == "😀"


def test_of_a_prompt_in_characters_of_three_tokens_no_more_is_kept_than_of_another():
    """Of eight such tokens, or sixteen, or any power of two, the first are in mid-character."""
    tokenizer = Tokenizer(models.BPE(byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    prompt, output = tokenizer.encode(1000 * "字").ids, tokenizer.encode("漢").ids
    assert len(output) == 3
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True, prompt=prompt)
    assert [decoder.step(id_) for id_ in output] == [None, None, "漢"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_between_words_take_no_space_away(name: str):
    tokenizer = TOKENIZERS[name]
    word, end = tokenizer.encode("the").ids, tokenizer.token_to_id("</s>")
    output = [*word, *(3 * MAX_WINDOW_TOKENS * [end]), *word]
    assert streamed(tokenizer, word, output) == added(tokenizer, word, output)


def test_a_long_run_of_broken_bytes_is_given_out_before_its_end():
    tokenizer = TOKENIZERS["byte level"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lone = next(
        tokenizer.token_to_id(symbol)
        for symbol in alphabet
        if tokenizer.decode([tokenizer.token_to_id(symbol)]) == REPLACEMENT
    )
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True)
    texts = [decoder.step(lone) for _ in range(10 * MAX_WINDOW_TOKENS)]
    assert any(texts)
    whole = "".join([*(text or "" for text in texts), decoder.rest()])
    assert whole == tokenizer.decode(10 * MAX_WINDOW_TOKENS * [lone])
