"""The special tokens of a tokenizer, and which of them mark reasoning and calls."""

from collections.abc import Mapping, Set

from tokenizers import Tokenizer

from quire.openai.tools.formats import FORMATS, REASONING_FORMATS


def all_but(special: Mapping[str, int], marks: Set[str]) -> frozenset[int] | None:
    """The special tokens without these marks; None if no mark is a special token."""
    kept = marks & special.keys()
    if not kept:
        return None
    return frozenset(token_id for text, token_id in special.items() if text not in kept)


def marks_of_reasoning(special: Mapping[str, int]) -> set[str]:
    """The marks of reasoning of the formats that these tokens know."""
    return {mark for one in REASONING_FORMATS if one.begin in special for mark in one.marks}


def marks_of_calls(special: Mapping[str, int]) -> set[str]:
    """The marks of calls of the formats that these tokens know."""
    return {mark for one in FORMATS if one.begin in special for mark in one.marks_in(special)}


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens by text."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}
