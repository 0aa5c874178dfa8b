"""Where a continuation begins among the token ids of the whole text."""

import pytest
from tokenizers import Tokenizer, models, processors

from quire.errors import InvalidRequest
from service.worker.model.continuations import MAX_CHOICE_TOKENS, encode_continued
from service.worker.model.text import ModelTokenizer

VOCABULARY = {"<s>": 0, "a": 1, "b": 2, "c": 3, " ": 4, "ab": 5, " c": 6, "bc": 7}
MERGES = [("a", "b"), (" ", "c"), ("b", "c")]


def tokenizer(*, begins: bool = True) -> ModelTokenizer:
    """A vocabulary in which `ab`, `bc` and a `c` behind a space are one token each."""
    backend = Tokenizer(models.BPE(VOCABULARY, MERGES))
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return ModelTokenizer(backend)


@pytest.mark.parametrize(
    ("given", "choice", "ids", "first"),
    [
        ("b", " c", [0, 2, 6], 2),
        ("cc", "cb", [0, 3, 3, 3, 2], 3),
        # One token of both texts is one of the choice.
        ("ca", "b", [0, 3, 5], 2),
        ("a", "b", [0, 5], 1),
        ("a ", "c", [0, 1, 6], 2),
        # The end of the input is read in another way.
        ("ab", "c", [0, 5, 3], 2),
    ],
)
def test_a_choice_begins_where_the_ids_differ_from_those_of_the_input(given, choice, ids, first):
    assert encode_continued(given, choice, tokenizer=tokenizer()) == (ids, first)


def test_token_ids_are_put_behind_each_other():
    assert encode_continued([3, 1], (2, 4), tokenizer=tokenizer()) == ([3, 1, 2, 4], 2)


@pytest.mark.parametrize(
    ("given", "choice", "field"),
    [("a", "b", "body.input"), ("b", "?", "body.choice")],
    ids=["one token of both", "no token of its own"],
)
def test_what_has_no_border_is_refused_with_the_field(given, choice, field):
    with pytest.raises(InvalidRequest) as refused:
        encode_continued(given, choice, tokenizer=tokenizer(begins=False))
    assert refused.value.field == field


def test_a_choice_of_more_tokens_than_a_vector_has_numbers_is_refused():
    most = "c" * MAX_CHOICE_TOKENS
    assert encode_continued("a", most, tokenizer=tokenizer())[1] == 2
    with pytest.raises(InvalidRequest, match="tokens") as refused:
        encode_continued("a", most + "c", tokenizer=tokenizer())
    assert refused.value.field == "body.choice"
