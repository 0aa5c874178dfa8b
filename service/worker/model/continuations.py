"""Encodes a text and its continuation, whose likelihood under the model is asked for."""

from collections.abc import Sequence
from itertools import takewhile

from engine.config import EngineConfig
from quire.errors import InvalidRequest
from quire.wire.pooling import MAX_DIMENSIONS
from service.worker.model.text import ModelTokenizer

#: The most tokens of a choice: its vector has a number for each.
MAX_CHOICE_TOKENS = MAX_DIMENSIONS


def encode_continued(
    given: str | list[int], choice: str | tuple[int, ...], *, tokenizer: ModelTokenizer
) -> tuple[list[int], int]:
    """The token ids of `given` with `choice` behind it, and how many of them are before the choice.

    Token ids are put behind each other. Texts are encoded together, as they would be in a prompt.
    The choice begins where the ids first differ from those of `given` alone: a token that the two
    texts share counts as one of the choice.

    Raises:
        InvalidRequest: nothing is left before the choice, or the choice has no token of its own, or
            too many.
    """
    if isinstance(choice, tuple):
        assert not isinstance(given, str)
        return [*given, *choice], len(given)
    assert isinstance(given, str)
    alone, both = tokenizer.encode_prompt(given), tokenizer.encode_prompt(given + choice)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, both, strict=False))
    first = sum(1 for _ in same)
    if first == 0:
        message = "has no token before the choice: the two are one token"
        raise InvalidRequest("body.input", message)
    if first == len(both):
        raise InvalidRequest("body.choice", "has no token of its own behind the input")
    if len(both) - first > MAX_CHOICE_TOKENS:
        message = f"has {len(both) - first} tokens; at most {MAX_CHOICE_TOKENS} are compared"
        raise InvalidRequest("body.choice", message)
    return both, first


def refuse_faulty_choice(token_ids: Sequence[int], first: int, config: EngineConfig) -> None:
    """InvalidRequest if the tokens from `first` on are at fault, and not those before them.

    The engine refuses what is left: it does not know where the choice begins.
    """
    most = config.max_request_tokens
    if first < most < len(token_ids):
        message = f"has {len(token_ids)} tokens together with its input; at most {most} are allowed"
        raise InvalidRequest("body.choice", message)
    outside = next((index for index, id_ in enumerate(token_ids) if id_ >= config.vocab_size), 0)
    if outside >= first:
        message = f"token id {token_ids[outside]} is outside the vocabulary of {config.vocab_size}"
        raise InvalidRequest("body.choice", message)
