"""Builders of the tests of grammars: tokens that go over their joints, and walks at random."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.constraint import Constraint as EngineConstraint
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import CompiledGrammars, load_grammars

EOS_ID, OTHER_EOS_ID = 0, 1
#: Of printable characters each pair is a token, so that tokens go over the joints of a grammar.
PRINTABLE = [chr(code) for code in range(33, 127)]


@cache
def pair_tokenizer() -> Tokenizer:
    pairs = list(product(PRINTABLE, PRINTABLE))
    symbols = ["<eos>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def compiled() -> CompiledGrammars:
    found = load_grammars(
        pair_tokenizer(), vocab_size=vocab_size(), eos_token_ids={EOS_ID, OTHER_EOS_ID}
    )
    assert isinstance(found, CompiledGrammars)
    return found


def vocab_size() -> int:
    """A model has more ids than its tokenizer has tokens."""
    return pair_tokenizer().get_vocab_size() + 62


def constraint(kind: Any, value: Any, *, output: Sequence[int] = ()) -> EngineConstraint:
    return compiled().constraint(Constraint(kind, value, f"body.{kind}"), output)


def may_come(rule: EngineConstraint, output: Sequence[int]) -> list[int]:
    found: list[int] = np.flatnonzero(
        np.unpackbits(rule.allowed(output), bitorder="little")
    ).tolist()
    return found


def walk(rule: EngineConstraint, *, seed: int, longest: int = 200) -> tuple[list[int], bool]:
    """Tokens at random of those that may come; whether they have come to an end."""
    chance, output = random.Random(seed), []
    while len(output) < longest:
        if rule.is_complete(output):
            return output, True
        found = may_come(rule, output)
        assert found, f"{rule.failure} after {text_of(output)!r}"
        token_id = chance.choice(found)
        if token_id in (EOS_ID, OTHER_EOS_ID):
            return output, True
        output.append(token_id)
    return output, False


def text_of(token_ids: Sequence[int]) -> str:
    text: str = pair_tokenizer().decode(list(token_ids))
    return text
