"""Steps in flight: what the next one is fed, and what happens when that was not the last word."""

import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch import Batch, DecodeRows
from engine.model.causal_model import BROKEN
from engine.model.run.model_runner import ModelRunner, StepInFlight, result_of
from engine.model.step import Fed, feed_of
from engine.request import FinishReason
from tests.engine.model.builders import (
    EOS,
    generate,
    make_prompt,
    make_request,
    make_row,
    make_runner,
)
from tests.engine.model.test_step import decodes_of


@pytest.fixture
def runner(model_folder) -> ModelRunner:
    runner = make_runner(model_folder("llama"))
    runner._runs_ahead = True
    return runner


def requests(**sampling):
    return [
        make_request(
            str(index),
            make_prompt(3 + 7 * index, salt=index),
            seed=index,
            temperature=1.0,
            **sampling,
        )
        for index in range(5)
    ]


def with_unknown(decodes: DecodeRows, *rows: int) -> DecodeRows:
    decodes.token_ids[list(rows)] = -1
    return decodes


def test_an_unknown_token_is_that_of_the_same_request_in_the_step_before():
    decodes = with_unknown(decodes_of(2, 3, 4), 0, 2)
    fed = feed_of(decodes, ["d2", "another", "d0"], torch.tensor([7, 8, 9]))
    known = int(decodes.token_ids[1])
    tokens = fed.put_into(torch.tensor([-1, known, -1, 50, 51]))
    assert tokens.tolist() == [9, known, 7, 50, 51]


def test_where_all_tokens_are_known_nothing_is_fed():
    assert feed_of(decodes_of(2, 3), ["d0", "d1"], torch.tensor([7, 8])) is None


def test_what_is_fed_can_be_looked_up_even_where_there_is_no_token():
    decodes = with_unknown(decodes_of(2), 0)
    fed = feed_of(decodes, ["d0"], torch.tensor([BROKEN]))
    assert isinstance(fed, Fed)
    assert fed.put_into(torch.tensor([-1])).tolist() == [0]


@pytest.mark.parametrize("max_candidates", [1, 8, 256])
def test_a_draw_that_the_candidates_leave_open_feeds_the_step_behind_once_more(
    runner, max_candidates, monkeypatch
):
    """The tokens are those of an engine that waits, whatever is decided late."""
    repeated = []
    compute = StepInFlight._compute
    monkeypatch.setattr(
        StepInFlight,
        "_compute",
        lambda step: (repeated.append(step) if hasattr(step, "_tokens") else None, compute(step))[
            1
        ],
    )
    runner._sampler._max_candidates = max_candidates
    ahead = generate(runner, requests(top_p=0.9))
    runner._runs_ahead = False
    assert generate(runner, requests(top_p=0.9)).tokens == ahead.tokens
    assert bool(repeated) == (max_candidates < 256)


samplings = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 9), "temperature": st.sampled_from([0.0, 1.0])},
    optional={
        "top_p": st.just(0.9),
        "top_k": st.sampled_from([2, 50]),
        "min_p": st.just(0.05),
        "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(0.9),
        "allowed_token_ids": st.sampled_from([(EOS, 9, 55, 56), tuple(range(40, 90))]),
        "logit_bias": st.just(((EOS, 4.0), (50, 3.0), (60, -100.0))),
        "logprobs": st.integers(0, 3),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.just(tuple(range(3, 50))),
        "ignore_eos": st.just(False),
    },
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    asked=st.lists(st.tuples(st.integers(1, 16), samplings), min_size=1, max_size=6),
    max_candidates=st.sampled_from([1, 4, 256]),
    tight=st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([7, 12, 64]),
            "num_host_blocks": st.sampled_from([0, 1, 32]),
        },
        optional={
            "preemption_mode": st.sampled_from(["swap", "recompute"]),
            "max_num_batched_tokens": st.sampled_from([1, 5]),
        },
    ),
)
def test_steps_in_flight_say_what_steps_that_are_waited_for_say(
    runner, asked, max_candidates, tight
):
    """Whatever is drawn late, preempted in flight, asked about, or ended by its tokens."""
    runner._sampler._max_candidates = max_candidates
    said = []
    for runs_ahead in (True, False):
        runner._runs_ahead = runs_ahead
        generated = generate(
            runner,
            [
                make_request(
                    str(index), make_prompt(length, salt=index % 3), seed=index, **sampling
                )
                for index, (length, sampling) in enumerate(asked)
            ],
            **tight,
        )
        said.append(generated)
    assert said[0].tokens == said[1].tokens
    for name, ahead in said[0].logprobs.items():
        waited = said[1].logprobs[name]
        assert [one.logprob for one in ahead] == pytest.approx(
            [one.logprob for one in waited], abs=1e-4
        )
        num_told = len(said[0].tokens[name]) if "logprobs" in asked[int(name)][1] else 0
        assert len(ahead) == len(waited) == num_told


def test_a_step_that_was_fed_a_wrong_token_and_not_computed_again_would_be_seen(
    runner, monkeypatch
):
    """The control of the test before."""
    runner._sampler._max_candidates = 1
    compute = StepInFlight._compute
    monkeypatch.setattr(
        StepInFlight, "_compute", lambda step: None if hasattr(step, "_tokens") else compute(step)
    )
    ahead = generate(runner, requests(top_p=0.9))
    runner._runs_ahead = False
    assert generate(runner, requests(top_p=0.9)).tokens != ahead.tokens


def test_results_are_waited_for_once_and_let_the_steps_before_go(runner):
    first = runner.launch(Batch(step=1, catch_up_rows=(make_row(block_ids=range(4)),)))
    behind = runner.launch(
        Batch(step=2, catch_up_rows=(make_row(request_id="s", block_ids=range(4, 8)),)),
        after=first,
    )
    assert first.is_in_flight
    assert first.result() is first.result()
    assert behind.result().token_ids.keys() == {"s"}
    assert (first._next, behind._after) == (None, None)


def test_of_a_step_that_has_ended_its_tokens_alone_wait_for_the_end_of_the_next(runner):
    """Nothing as wide as the vocabulary: a third step's would then be in memory with it."""
    asks = {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}
    first = runner.launch(Batch(step=1, catch_up_rows=(make_row(**asks),)))
    wide = [
        weakref.ref(tensor)
        for tensor in (first._draws._scaled, first._draws._likelihoods._logprobs)
    ]
    behind = runner.launch(Batch(step=2, catch_up_rows=(make_row(request_id="s"),)), after=first)
    assert all(tensor() is not None for tensor in wide)
    first.result()
    assert behind._after is first
    assert [tensor() for tensor in wide] == [None, None]


def test_a_step_whose_rows_all_go_on_filling_the_cache_has_no_tokens(runner):
    row = make_row(make_prompt(9), end=5, block_ids=range(4))
    assert runner.launch(Batch(step=1, catch_up_rows=(row,))).result().token_ids == {}


def test_a_request_whose_logits_are_no_numbers_ends_alone_while_others_are_in_flight(runner):
    embeddings = runner.model.embedding
    healthy = embeddings[200].clone()
    others = requests()[:2]
    expected = generate(runner, requests()[:2]).tokens
    try:
        embeddings[200] = torch.nan
        bad = make_request("bad", [200, 5])
        with pytest.raises(AssertionError, match="no finite logit"):
            generate(runner, [*others, bad])
    finally:
        embeddings[200] = healthy
    assert bad.finish_reason is FinishReason.ERROR
    assert generate(runner, requests()[:2]).tokens == expected


def test_the_tokens_of_decodes_come_in_their_order_and_those_of_other_rows_by_their_ids():
    others = (make_row(request_id="p"), make_row(request_id="q"))
    batch = Batch(step=1, decodes=decodes_of(2, 3, 4), catch_up_rows=others)
    result = result_of(batch, batch.due, [7, 8, 9, 5, 6], {})
    assert (result.decoded, result.token_ids) == ([7, 8, 9], {"p": 5, "q": 6})
    assert result.failures == {}
    result = result_of(batch, batch.due, [7, BROKEN, 9, BROKEN, 6], {})
    assert (result.decoded[0], result.decoded[2], result.token_ids) == (7, 9, {"q": 6})
    assert set(result.failures) == {"d1", "p"}


def test_a_place_without_a_token_ends_the_run_before_it_and_the_first_one_fails_its_row():
    drafted = make_row(output=(8, 9, 10), request_id="d")._replace(num_drafted=2)
    fails = drafted._replace(request_id="f")
    plain = make_row(request_id="p")
    batch = Batch(step=1, catch_up_rows=(drafted, plain, fails))
    due = batch.due
    assert [one.request_id for one in due] == ["d", "d", "d", "p", "f", "f", "f"]
    result = result_of(batch, due, [9, BROKEN, 11, 5, BROKEN, 10, 11], {})
    assert (result.runs, result.token_ids) == ({"d": [9]}, {"p": 5})
    assert result.failures == {"f": "no finite logit to choose from"}
    assert result_of(batch, due, [9, 10, 11, 5, 9, 7, 11], {}).runs == {
        "d": [9, 10, 11],
        "f": [9, 7],
    }
