"""A workload is the same amount of work every time it is made, and never the same prompts twice."""

import pytest

from benchmarks.bench_peers import Measurement
from benchmarks.common.cases import CASES, Case
from benchmarks.common.workloads import NAMES, SHARED_PREFIX_TOKENS, make_workload


@pytest.mark.parametrize("name", NAMES)
def test_turns_of_a_workload_differ_in_their_prompts_alone(name):
    first, second = (make_workload(name, vocab_size=8192, turn=turn) for turn in (0, 1))
    assert shape(first) == shape(second)
    assert all(
        a.prompt_token_ids != b.prompt_token_ids
        for a, b in zip(first.items, second.items, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_turn_is_the_same_workload(name):
    assert make_workload(name, vocab_size=99, turn=3) == make_workload(name, vocab_size=99, turn=3)


def test_half_of_the_requests_of_w3_share_a_prefix_and_no_others_do():
    items = make_workload("W3", vocab_size=8192).items
    prefix = items[0].prompt_token_ids[:SHARED_PREFIX_TOKENS]
    sharing = [item for item in items if item.prompt_token_ids[:SHARED_PREFIX_TOKENS] == prefix]
    assert (len(items), len(sharing)) == (256, 128)


def test_requests_of_w3_arrive_one_after_the_other_at_the_rate_asked_for():
    arrivals = [
        item.arrival_seconds
        for item in make_workload("W3", vocab_size=99, arrivals_per_second=10.0).items
    ]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0.0
    assert 256 / arrivals[-1] == pytest.approx(10.0, rel=0.2)


def test_prompts_of_w4_are_long_and_fit_the_context():
    items = make_workload("W4", vocab_size=99).items
    assert len(items) == 8
    assert all(4096 <= len(item.prompt_token_ids) <= 8192 - 64 for item in items)
    assert {item.num_output_tokens for item in items} == {64}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_an_arrival_rate_and_a_vocabulary(case, tmp_path):
    measurement = Measurement(Case.of(case), (), runs_file=tmp_path / "runs.jsonl")
    assert len(measurement._make("W3", turn=0).items) == 256


def shape(workload):
    return [
        (len(item.prompt_token_ids), item.num_output_tokens, item.arrival_seconds)
        for item in workload.items
    ]
