"""Guesses under a constraint: what it lets come, and an output that is what it was without."""

import random

import pytest

from service.worker.model.served import load_model
from tests.service.builders import make_settings
from tests.service.walks import EOS_ID, constraint, pair_tokenizer, text_of, walk
from tests.service.worker.constraints.test_constraints import (
    folder_of_a_random_model,
    run_about_persons,
)
from tests.service.worker.constraints.test_grammars import PERSON


def ids_of(text: str) -> list[int]:
    return pair_tokenizer().encode(text).ids


def test_what_has_to_come_is_spelled_out():
    rule = constraint("json_schema", PERSON)
    # Not the last letter: with the mark behind it, it may be another token.
    assert text_of(rule.draft(ids_of('{"'), [])) == "nam"
    assert text_of(rule.draft(ids_of('{"'), ids_of("XY"))) == "nam"


def test_where_there_is_a_choice_a_guess_is_kept_as_far_as_it_may_come():
    digits, letters = ids_of("1234"), ids_of("ab")
    assert constraint("regex", "[0-9]{1,9}").draft([], [*digits, *letters]) == digits
    assert constraint("regex", "[0-9]{1,9}").draft([], letters) == []
    assert constraint("regex", "[0-9]{1,9}").draft([], []) == []


def test_nothing_is_guessed_behind_an_end():
    output, digits = ids_of("12"), ids_of("34")
    guess = [*digits, EOS_ID, *digits]
    assert constraint("regex", "[0-9]{1,9}").draft(output, guess) == digits


def test_one_that_has_failed_guesses_nothing():
    output = ids_of("no")
    assert list(constraint("regex", "[0-9]+", output=output).draft(output, ids_of("1"))) == []


@pytest.mark.parametrize("seed", range(10))
def test_behind_a_draft_may_come_what_may_come_behind_the_same_output(seed: int):
    """And the one that was asked stays where its output is."""
    chance, rule = random.Random(seed), constraint("json_schema", PERSON)
    output, _ = walk(constraint("json_schema", PERSON), seed=seed, longest=80)
    for length in range(0, len(output), 3):
        known, guess = output[:length], output[length : length + chance.randint(1, 5)]
        draft = list(rule.draft(known, guess))
        for count in range(1, len(draft) + 1):
            behind = [*known, *draft[:count]]
            ahead = rule.assuming(known, draft[:count])
            wanted = constraint("json_schema", PERSON, output=behind).allowed(behind)
            assert ahead.allowed(behind).tolist() == wanted.tolist()
            assert ahead.is_complete(behind) == constraint(
                "json_schema", PERSON, output=behind
            ).is_complete(behind)
        fresh = constraint("json_schema", PERSON, output=known)
        assert rule.allowed(known).tolist() == fresh.allowed(known).tolist()


def test_a_schema_is_filled_in_with_the_same_tokens_in_fewer_steps(
    tmp_path_factory: pytest.TempPathFactory,
):
    folder = folder_of_a_random_model(tmp_path_factory.getbasetemp() / "random")
    settings = {"model": str(folder), "dtype": "bfloat16", "num_blocks": 700}
    outputs, snapshots = [], []
    for number in (0, 6):
        served = load_model(
            make_settings("redis://", "none", num_speculative_tokens=number, **settings)
        )
        outputs.append([request.output_token_ids for request in run_about_persons(served)])
        snapshots.append(served.engine.snapshot())
        assert served.engine.violations() == []
    assert outputs[1] == outputs[0]
    assert snapshots[1].accepted_draft_tokens > 100
    assert snapshots[1].steps < snapshots[0].steps
