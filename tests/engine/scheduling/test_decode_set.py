"""The set of requests that decode: what it leaves as it was, and what it notices.

What it plans is what each member would plan alone: test_properties.
"""

import pytest

from engine.batch import UNKNOWN_TOKEN
from engine.request import Progress, Request
from engine.scheduling.decode_set import DecodeSet, limit_of
from tests.engine.builders import EOS, make_config, make_request

BLOCK_IDS = [4, 2]


def caught_up(request_id: str = "r", *, with_first_token: bool = True, **others) -> Request:
    """A running request with one pending token, as the scheduler hands it over."""
    request = make_request(request_id, **({"max_tokens": 9} | others))
    request.num_pending_tokens = 1
    if with_first_token:
        request.times.first_token = 1.0
    return request


def make_set(*requests: Request, max_requests: int | None = None, **config) -> DecodeSet:
    decodes = DecodeSet(make_config(**config), max_requests=max_requests or len(requests))
    for request in requests:
        decodes.join(request, BLOCK_IDS)
    return decodes


def advance(decodes: DecodeSet, token_ids):
    """A step of all members, from its plan to its tokens, which are given by request id."""
    rows = decodes.rows()
    decodes.advance()
    return decodes.append_tokens(rows, [token_ids[r.request_id] for r in rows.requests])[0]


def test_the_rows_of_a_step_stay_as_they_were_when_the_set_goes_on():
    a, b = caught_up("a", prompt=[5, 6]), caught_up("b", prompt=[7, 8, 9])
    decodes = make_set(a, b)
    rows = decodes.rows()
    advance(decodes, {"a": 11, "b": 21})
    decodes.leave(a)
    decodes.join(caught_up("c", prompt=3), [9])
    assert rows.requests == (a, b)
    assert (rows.token_ids.tolist(), rows.starts.tolist()) == ([6, 9], [1, 2])
    assert rows.block_tables.tolist() == [[4], [4]]


def test_only_an_eos_a_limit_or_something_to_watch_calls_for_a_closer_look():
    members = {
        "plain": caught_up("plain"),
        "eos": caught_up("eos"),
        "limit": caught_up("limit", max_tokens=1),
        "stop": caught_up("stop", stop_token_ids=(9,)),
        "first": caught_up("first", with_first_token=False),
        "model length": caught_up("model length", prompt=19),
    }
    decodes = make_set(*members.values(), max_model_len=20)
    rows = decodes.rows()
    assert [request.request_id for request in decodes.advance()] == ["limit", "model length"]
    _, looked_at = decodes.append_tokens(rows, [5, EOS, 5, 5, 5, 5])
    assert [r.request_id for r in looked_at] == ["eos", "limit", "stop", "first", "model length"]


@pytest.mark.parametrize("eos_token_ids", [(), (1,), (1, 250)])
def test_each_of_the_tokens_that_end_a_sequence_calls_for_a_closer_look(eos_token_ids):
    members = [caught_up(f"r{token_id}") for token_id in (0, 1, 2, 250)]
    decodes = make_set(*members, eos_token_ids=frozenset(eos_token_ids))
    rows = decodes.rows()
    decodes.advance()
    _, looked_at = decodes.append_tokens(rows, [0, 1, 2, 250])
    assert [request.output_token_ids[-1] for request in looked_at] == list(eos_token_ids)


def test_a_request_whose_first_token_is_under_way_needs_no_look_for_it():
    request = caught_up("first", with_first_token=False)
    request.num_computed_tokens += 1
    request.expect_token()
    decodes = make_set(request)
    rows = decodes.rows()
    request.append_token(5)
    decodes.note_last_token(request)
    assert decodes.violations() == []
    decodes.advance()
    assert decodes.append_tokens(rows, [6])[1] == []


def test_the_nearest_limit_ends_a_request():
    config = make_config(max_model_len=20)
    assert limit_of(caught_up(prompt=5, max_tokens=9), config) == 14
    assert limit_of(caught_up(prompt=15, max_tokens=9), config) == 20
    assert limit_of(caught_up(prompt=5, output=[1, 2], max_tokens=9), config) == 14


def test_an_empty_set_plans_nothing_and_advances_by_nothing():
    decodes = make_set()
    assert decodes.rows().as_rows() == decodes.at_block_boundary() == []
    assert decodes.advance() == []
    assert decodes.append_tokens(decodes.rows(), []) == (Progress(), [])


def test_only_a_request_that_has_caught_up_can_join():
    with pytest.raises(AssertionError):
        make_set(make_request(prompt=5))


def test_a_token_that_the_set_was_not_told_of_is_noticed():
    request = caught_up("a", prompt=5)
    decodes = make_set(request)
    request.expect_token()
    assert decodes.violations() == ["a: 2 pending of 6 tokens, in a decode column of 5"]


def test_a_block_that_changed_under_the_set_is_noticed():
    block_ids = [4, 2]
    decodes = make_set(max_requests=1)
    decodes.join(caught_up("a", prompt=5), block_ids)
    assert decodes.violations() == []
    block_ids[0] = 3
    assert decodes.violations() == ["a: other blocks in its decode table"]


def test_a_token_that_was_changed_under_the_set_is_noticed():
    request = caught_up("a", prompt=5)
    decodes = make_set(request)
    request.prompt_token_ids[-1] += 1
    assert decodes.violations() == ["a: another token is pending in its decode seat"]


def test_a_prompt_that_became_longer_under_the_set_is_noticed():
    request = caught_up("a", prompt=5, output=[6, 7])
    decodes = make_set(request)
    request.prompt_token_ids.append(request.output_token_ids.pop(0))
    assert decodes.violations() == ["a: another prompt's length in its decode column"]


@pytest.mark.parametrize("token_ids", [[7], [7, 8, 9], [7, UNKNOWN_TOKEN]])
def test_a_step_that_brings_too_few_tokens_too_many_or_none_for_one_changes_nothing(token_ids):
    members = [caught_up("a", prompt=3), caught_up("b", prompt=4)]
    decodes = make_set(*members)
    rows = decodes.rows()
    decodes.advance()
    with pytest.raises(AssertionError):
        decodes.append_tokens(rows, token_ids)
    assert [(r.output_token_ids, r.expects_token) for r in members] == [([], True)] * 2
