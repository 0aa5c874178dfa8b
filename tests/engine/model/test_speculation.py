"""With a real model: guessed tokens change no token, no log-probability and no end."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch import BatchRow
from tests.engine.builders import Residues
from tests.engine.model.builders import generate, make_prompt, make_request, with_seers
from tests.engine.model.run.test_model_runner import samplings

SPECULATION = {"num_speculative_tokens": 5, "max_speculative_step_tokens": 24}


def asked_for(asked, *, constrained: bool):
    requests = []
    for index, (length, sampling) in enumerate(asked):
        is_constrained = constrained and index % 2
        # Together with a list of allowed tokens a constraint might leave none: another test's.
        others = sampling | ({"allowed_token_ids": ()} if is_constrained else {})
        request = make_request(
            str(index), make_prompt(length, salt=index % 3), seed=index, **others
        )
        if is_constrained:
            request.constraint = Residues(length=7)
        requests.append(request)
    return requests


cases = given(
    asked=st.lists(st.tuples(st.integers(1, 16), samplings), min_size=1, max_size=6),
    wrong=st.sets(st.integers(0, 9), max_size=3),
    constrained=st.booleans(),
    max_candidates=st.sampled_from([1, 4, 256]),
    ahead=st.booleans(),
    tight=st.fixed_dictionaries(
        {"num_blocks": st.sampled_from([12, 64])},
        optional={
            "max_num_batched_tokens": st.sampled_from([3, 16]),
            "max_num_seqs": st.just(2),
            "max_speculative_step_tokens": st.sampled_from([2, 5]),
        },
    ),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@cases
def test_the_compiled_form_says_with_guesses_what_it_says_without(
    runner_of, asked, wrong, constrained, max_candidates, ahead, tight
):
    """To the last bit of every log-probability, whatever is launched ahead."""
    runner = runner_of("llama")
    runner._sampler._max_candidates = max_candidates
    plain = generate(runner, asked_for(asked, constrained=constrained), **tight)
    requests = with_seers(asked_for(asked, constrained=constrained), plain, wrong)
    runner._runs_ahead = ahead
    guessed = generate(runner, requests, **(SPECULATION | tight))
    runner._runs_ahead, runner._sampler._max_candidates = False, 256
    assert guessed.tokens == plain.tokens
    assert guessed.logprobs == plain.logprobs


ASKED = [
    (9, {"max_tokens": 20}),
    (5, {"max_tokens": 20, "temperature": 0.9, "top_p": 0.9}),
    (14, {"max_tokens": 20, "repetition_penalty": 1.3, "logprobs": 2}),
    (3, {"max_tokens": 20, "frequency_penalty": 0.7, "temperature": 1.2, "min_p": 0.01}),
]


@pytest.mark.parametrize("path", ["auto", "wide"])
def test_right_guesses_save_steps_and_no_token_is_another(runner_of, path):
    runner = runner_of("llama", path)
    plain = generate(runner, asked_for(ASKED, constrained=False))
    requests = with_seers(asked_for(ASKED, constrained=False), plain, {3, 11})
    guessed = generate(runner, requests, **SPECULATION)
    assert guessed.tokens == plain.tokens
    assert guessed.snapshot.steps < plain.snapshot.steps / 2
    assert guessed.snapshot.accepted_draft_tokens > 40


def test_a_guess_that_was_taken_unseen_would_be_seen(runner_of, monkeypatch):
    """The control of the tests before."""
    runner = runner_of("llama")
    plain = generate(runner, asked_for(ASKED, constrained=False))
    requests = with_seers(asked_for(ASKED, constrained=False), plain, {3, 11})
    monkeypatch.setattr(BatchRow, "run_of", lambda row, token_ids: [*row.draft, token_ids[-1]])
    assert generate(runner, requests, **SPECULATION).tokens != plain.tokens


def test_a_place_that_did_not_count_the_draft_before_it_would_be_seen(runner_of, monkeypatch):
    """Its noise and its penalties would be those of another token."""
    runner = runner_of("llama")
    plain = generate(runner, asked_for(ASKED, constrained=False))
    requests = with_seers(asked_for(ASKED, constrained=False), plain, set())
    monkeypatch.setattr(BatchRow, "unrolled", lambda row: [row] * (row.num_drafted + 1))
    guessed = generate(runner, requests, **SPECULATION)
    assert guessed.tokens != plain.tokens
    assert guessed.tokens["0"] == plain.tokens["0"], "the greedy one has neither"
