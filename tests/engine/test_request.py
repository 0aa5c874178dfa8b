"""A request's tokens, which are those of its prompt and those of its output."""

from itertools import combinations_with_replacement

import pytest

from engine.request import Priority
from tests.engine.builders import make_request


def test_the_four_priorities_are_ordered_and_normal_is_the_default():
    assert Priority.LOW < Priority.NORMAL < Priority.HIGH < Priority.CRITICAL
    assert make_request().priority is Priority.NORMAL


@pytest.mark.parametrize("output", [(), (4, 5, 6)])
def test_any_stretch_of_its_tokens_goes_on_from_the_prompt_into_the_output(output):
    request = make_request(prompt=[1, 2, 3], output=output)
    whole = [1, 2, 3, *output]
    for start, end in combinations_with_replacement(range(len(whole) + 2), 2):
        assert request.token_ids_between(start, end) == whole[start:end]


def test_a_stretch_is_no_view_of_the_tokens():
    request = make_request(prompt=[1, 2, 3], output=[4])
    request.token_ids_between(0, 2).append(9)
    request.token_ids_between(3, 4).append(9)
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [4])


def test_an_expected_token_counts_and_is_not_known():
    request = make_request(prompt=[1, 2])
    request.expect_token()
    assert (request.num_tokens, request.last_token_id) == (3, 2)
    assert request.token_ids_between(0, request.num_tokens) == [1, 2]
    request.append_token(7)
    assert (request.num_tokens, request.last_token_id) == (3, 7)


def test_the_time_it_was_preempted_adds_up_and_is_counted_once():
    times = make_request().times
    times.end_preemption(1.0)
    assert times.preempted_seconds == 0.0
    for began, ended in ((2.0, 3.5), (5.0, 7.0)):
        times.preempted_at = began
        times.end_preemption(ended)
        times.end_preemption(9.0)
    assert (times.preempted_seconds, times.preempted_at) == (3.5, None)
