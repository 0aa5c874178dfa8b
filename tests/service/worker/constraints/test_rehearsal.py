"""What compiles can continue, as long as an output may be; what cannot is refused at the start."""

import json
from typing import Any

import numpy as np
import pytest

from engine.constraint import Failure
from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.worker.constraints.probe import Probe, ProbedGrammars
from service.worker.constraints.rehearsal import CLOSING, failure_of
from tests.service.walks import (
    EOS_ID,
    compiled,
    constraint,
    may_come,
    pair_tokenizer,
    vocab_size,
    walk,
)
from tests.service.worker.constraints.test_probe import MIB, make_grammars

#: At most twenty words, and at most 200 characters.
WORDS = {"type": "string", "maxLength": 200, "pattern": r"^$|(^(?:\S+\s+){0,19}\S+$)"}
FIELDS = {"type": "object", "properties": dict.fromkeys("ab", WORDS), "required": ["a", "b"]}
LONG = {"type": "string", "maxLength": 8000}
#: Each object may have any of them, so each step has more possible parts than the limit allows.
MANY = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}


@pytest.mark.parametrize("schema", [WORDS, FIELDS])
@pytest.mark.parametrize("seed", range(3))
def test_what_compiles_can_continue(schema: dict[str, Any], seed: int):
    walk(constraint("json_schema", schema), seed=seed)


def test_a_long_text_of_bounded_length_comes_to_its_end_and_goes_on_after_any_token():
    text = json.dumps(
        "The fox, \N{LATIN SMALL LETTER E WITH ACUTE} \\ ab\n" * 430, ensure_ascii=False
    )
    tokens = pair_tokenizer().encode(text).ids
    rule = constraint("json_schema", LONG)
    for length, token_id in enumerate(tokens):
        bits = rule.allowed(tokens[:length])
        assert bits[token_id // 8] >> token_id % 8 & 1, f"{rule.failure} after {length}"
        if length % 1500 == 1499:
            later = constraint("json_schema", LONG, output=tokens[:length])
            assert later.allowed(tokens[:length]).tolist() == bits.tolist()
    assert EOS_ID in may_come(rule, tokens)


def test_what_cannot_continue_is_refused_before_the_first_token():
    probe = Probe(make_grammars(), cpu_seconds=5.0, memory_bytes=256 * MIB)
    try:
        wanted = Constraint("json_schema", MANY, "body.json_schema")
        with pytest.raises(InvalidRequest, match="is too complex to continue after") as refused:
            ProbedGrammars(make_grammars(), probe).constraint(wanted, [])
        assert refused.value.field == "body.json_schema"
        # An output that has begun elsewhere is not refused for what it may never reach.
        assert probe.judge(wanted, factor=4.0).refusal == ""
    finally:
        probe.close()


class Counted:
    """A constraint that allows every token until an output has a number of tokens."""

    field = "regex"

    def __init__(self, fails_at: int | None) -> None:
        self._fails_at = fails_at
        self.outputs: list[list[int]] = []
        self.failure: Failure | None = None

    def allowed(self, output: list[int]) -> np.ndarray:
        self.outputs.append(list(output))
        if len(output) == self._fails_at:
            self.failure = Failure(f"after {len(output)}", self.field)
        return np.full(2, 255 if self.failure is None else 0, dtype=np.uint8)

    def is_complete(self, output: list[int]) -> bool:
        return False


def test_each_output_closes_more_often_than_the_one_before():
    made: list[Counted] = []

    def start() -> Counted:
        made.append(Counted(None))
        return made[-1]

    closing = np.arange(16) == 3
    assert failure_of(start, closing=closing, ends=()) is None
    shares = [one.outputs[-1].count(3) / len(one.outputs[-1]) for one in made]
    assert len(shares) == len(CLOSING) and shares == sorted(shares)
    assert shares[0] < 0.2 and shares[-1] > 0.8


def test_the_first_failure_is_told_and_an_end_ends_an_output():
    closing = np.zeros(16, dtype=np.bool_)
    assert failure_of(lambda: Counted(7), closing=closing, ends=()) == ("after 7", "regex")
    assert failure_of(lambda: Counted(1), closing=closing, ends=range(16)) is None
    assert vocab_size() <= len(compiled()._speller.begins_with(b'"')) < vocab_size() + 40
