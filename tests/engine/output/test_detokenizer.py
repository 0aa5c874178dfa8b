"""Text comes out as soon as it is certain, and its pieces are always the text of the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.output.detokenizer import Detokenizer, StreamDecoder

EOS_ID = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character beyond ASCII is split over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.token_to_id("<eos>") == EOS_ID
    return tokenizer


def make(tokenizer: Tokenizer, *stop: str, **others) -> Detokenizer:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True)
    return Detokenizer(decoder, stop=stop, **others)


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """The text after each token, then the rest; ends early when a stop string is complete."""
    texts = []
    for token_id in token_ids:
        if detokenizer.append(token_id):
            break
        texts.append(detokenizer.take_text(final=False))
    return [*texts, detokenizer.take_text(final=True)]


def test_a_character_comes_out_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("aé漢b").ids
    assert pieces(make(tokenizer), ids) == ["a", "", "é", "", "", "漢", "b", ""]


def test_an_open_character_at_the_end_is_given_out_as_a_replacement_mark(tokenizer):
    ids = tokenizer.encode("aé").ids[:-1]
    assert "".join(pieces(make(tokenizer), ids)) == "a\N{REPLACEMENT CHARACTER}"


def test_special_tokens_have_no_text(tokenizer):
    assert "".join(pieces(make(tokenizer), [*tokenizer.encode("ab").ids, EOS_ID])) == "ab"


def test_an_id_beyond_the_tokenizer_has_no_text_and_breaks_nothing(tokenizer):
    a, b = tokenizer.encode("ab").ids
    assert pieces(make(tokenizer), [a, 9999, b]) == ["a", "", "b", ""]


def test_a_token_that_the_library_fails_on_has_no_text_and_ends_nothing(tokenizer):
    class Failing:
        """The tokenizer, but for one token."""

        def __init__(self, refused: int) -> None:
            self._refused = refused
            self.id_to_token = tokenizer.id_to_token

        def decode(self, token_ids, *, skip_special_tokens):
            if self._refused in token_ids:
                raise RuntimeError("index out of range")
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    a, b, c = tokenizer.encode("abc").ids
    decoder = StreamDecoder(Failing(b), skip_special_tokens=True)
    assert [decoder.step(token_id) for token_id in (a, b, c)] == ["a", None, "c"]
    assert decoder.rest() == ""


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer):
    ids = tokenizer.encode("abcd").ids
    assert pieces(make(tokenizer, "xyz"), ids) == ["", "", "a", "b", "cd"]


def test_a_stop_string_split_over_tokens_ends_the_text_before_it(tokenizer):
    ids = tokenizer.encode("one END two").ids
    assert "".join(pieces(make(tokenizer, "END"), ids)) == "one "


def test_a_stop_string_can_be_kept_in_the_text(tokenizer):
    ids = tokenizer.encode("one END two").ids
    kept = make(tokenizer, "END", include_stop_str_in_output=True)
    assert "".join(pieces(kept, ids)) == "one END"


def test_of_several_stop_strings_the_one_completed_first_wins(tokenizer):
    ids = tokenizer.encode("abcdef").ids
    assert "".join(pieces(make(tokenizer, "cdef", "bc"), ids)) == "a"


class Says:
    """A decoder whose tokens have texts of several characters."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def step(self, token_id: int) -> str | None:
        return self._texts[token_id]

    def rest(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("stop", "kept"), [(("cdef", "bc", "bcd"), "a"), (("cd", "bcd"), "a"), (("ef", "f"), "abcd")]
)
def test_of_several_stop_strings_in_one_token_the_one_completed_first_wins(stop, kept):
    assert "".join(pieces(Detokenizer(Says("abcdef"), stop=stop), [0])) == kept


def test_no_stop_string_counts_before_min_tokens(tokenizer):
    ids = tokenizer.encode("..x..x").ids
    assert "".join(pieces(make(tokenizer, "x", min_tokens=3), ids)) == "..x.."


@pytest.mark.parametrize("others", [(), ("unsaid",), ("xyz", "x.....")])
def test_one_that_was_complete_by_then_does_not_count_later_beside_a_longer_one(tokenizer, others):
    ids = tokenizer.encode("..x..x").ids
    detokenizer = make(tokenizer, "x", *others, min_tokens=3)
    assert [detokenizer.append(id_) for id_ in ids] == [False] * 5 + [True]
    assert detokenizer.take_text(final=True) == "..x.."


def test_one_that_only_begins_before_min_tokens_counts(tokenizer):
    ids = tokenizer.encode("..x..x").ids
    assert "".join(pieces(make(tokenizer, "x.", min_tokens=3), ids)) == ".."


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 60), stop=st.text(min_size=1, max_size=3))
def test_replaying_any_prefix_gives_the_text_that_would_have_come(text, cut, stop):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    whole = make(tokenizer, stop)
    uninterrupted = pieces(whole, ids)
    published = ids[: min(cut, len(uninterrupted) - 1)]
    heir = make(tokenizer, stop)
    for token_id in published:
        heir.append(token_id)
    heir.take_text(final=False)
    before = "".join(uninterrupted[: len(published)])
    assert before + "".join(pieces(heir, ids[len(published) :])) == "".join(uninterrupted)
    assert "".join(uninterrupted) == (text.partition(stop)[0] if stop in text else text)
