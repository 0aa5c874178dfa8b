"""The set of requests that decode: what it takes in, how it advances, and what it notices."""

import pytest

from engine.batch import UNKNOWN_TOKEN
from engine.request import FinishReason, Progress, Request
from engine.scheduling.decode_set import DecodeSet, limit_of, that_filled_a_block
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


def test_every_member_has_its_last_token_computed_at_the_last_position():
    a, b = caught_up("a", prompt=[5, 6]), caught_up("b", prompt=[7, 8, 9], output=[3])
    rows = make_set(a, b).rows().as_rows()
    assert [(row.request_id, row.token_ids, row.start, row.samples) for row in rows] == [
        ("a", (6,), 1, True),
        ("b", (3,), 3, True),
    ]
    assert rows[1].prompt_token_ids is b.prompt_token_ids
    assert rows[1].output_token_ids is b.output_token_ids
    assert rows[1].sampling is b.sampling
    assert rows[1].block_ids == BLOCK_IDS[:1]


def test_a_step_appends_one_token_to_every_member_and_leaves_one_pending():
    a, b = caught_up("a", prompt=[5, 6]), caught_up("b", prompt=[7], output=[3])
    decodes = make_set(a, b)
    progress = advance(decodes, {"b": 21, "a": 11})
    assert (progress.requests, progress.starts, progress.token_ids) == ([a, b], [0, 1], [11, 21])
    assert (a.output_token_ids, a.num_tokens, a.num_computed_tokens) == ([11], 3, 2)
    assert (b.output_token_ids, b.num_tokens, b.num_computed_tokens) == ([3, 21], 3, 2)
    assert [row.token_ids for row in decodes.rows().as_rows()] == [(11,), (21,)]
    assert decodes.violations() == []


def test_between_a_launched_step_and_its_tokens_every_member_is_one_unknown_token_longer():
    a, b = caught_up("a", prompt=[5, 6]), caught_up("b", prompt=[7], output=[3])
    decodes = make_set(a, b)
    first = decodes.rows()
    decodes.advance()
    assert [r.num_tokens for r in (a, b)] == [3, 3]
    assert [(r.output_index, r.num_output_tokens) for r in (a, b)] == [(1, 0), (2, 1)]
    second = decodes.rows()
    assert decodes.violations() == []
    assert (second.token_ids.tolist(), second.starts.tolist()) == ([UNKNOWN_TOKEN] * 2, [2, 2])
    decodes.append_tokens(first, [11, 21])
    assert [r.num_tokens for r in (a, b)] == [3, 3]
    assert decodes.rows().token_ids.tolist() == [11, 21]
    assert (first.token_ids.tolist(), second.starts.tolist()) == ([6, 3], [2, 2])


def test_the_tokens_of_those_that_have_ended_are_nobodys():
    a, b, c = (caught_up(name, prompt=3) for name in "abc")
    decodes = make_set(a, b, c)
    rows = decodes.rows()
    decodes.advance()
    b.finish_reason = FinishReason.CANCELLED
    left, token_ids = rows.without_finished([7, 8, 9])
    progress, _ = decodes.append_tokens(left, token_ids)
    assert progress.requests == [a, c]
    assert [request.output_token_ids for request in (a, b, c)] == [[7], [], [9]]
    assert [len(left), len(left.starts), len(left.block_tables), len(left.watched_from)] == [2] * 4


def test_those_that_stay_keep_their_order_and_their_numbers_when_others_leave():
    members = [caught_up(name, prompt=1 + index) for index, name in enumerate("abcd")]
    decodes = make_set(*members)
    decodes.leave(members[0])
    decodes.leave(members[2])
    assert [(row.request_id, row.start) for row in decodes.rows().as_rows()] == [("b", 1), ("d", 3)]
    assert len(decodes) == 2
    assert decodes.violations() == []


def test_the_place_of_one_that_left_is_taken_by_the_next_that_joins():
    members = [caught_up(name, prompt=3) for name in "ab"]
    decodes = make_set(*members)
    decodes.leave(members[0])
    decodes.join(caught_up("c", prompt=5), BLOCK_IDS)
    assert [(row.request_id, row.start) for row in decodes.rows().as_rows()] == [("b", 2), ("c", 4)]


def test_each_row_has_the_blocks_that_its_request_holds_by_then():
    long, short = caught_up("long", prompt=9), caught_up("short", prompt=3)
    decodes, blocks_of_long, blocks_of_short = make_set(max_requests=2), [7, 3], [5]
    decodes.join(long, blocks_of_long)
    decodes.join(short, blocks_of_short)
    assert decodes.at_block_boundary() == [long]
    blocks_of_long.append(8)
    rows = decodes.rows()
    assert rows.block_tables[0].tolist() == [7, 3, 8]
    assert [row.block_ids for row in rows.as_rows()] == [[7, 3, 8], [5]]
    advance(decodes, {"long": 1, "short": 1})
    decodes.leave(long)
    assert decodes.rows().block_tables.tolist() == [[5]]
    advance(decodes, {"short": 1})
    assert decodes.at_block_boundary() == [short]
    blocks_of_short.append(7)
    assert decodes.rows().block_tables.tolist() == [[5, 7]]


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


@pytest.mark.parametrize(("block_size", "lengths"), [(4, [1, 5, 9]), (1, [*range(1, 11)])])
def test_a_member_is_at_a_block_boundary_when_its_pending_token_begins_a_block(block_size, lengths):
    members = [caught_up(f"r{length}", prompt=length) for length in range(1, 11)]
    decodes = make_set(*members, block_size=block_size)
    assert [request.num_tokens for request in decodes.at_block_boundary()] == lengths


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


@pytest.mark.parametrize(("block_size", "prompts"), [(4, [4, 8]), (1, [*range(1, 9)])])
def test_a_step_that_fills_a_block_says_whose_and_how_much_is_computed(block_size, prompts):
    members = [caught_up(f"r{length}", prompt=length) for length in range(1, 9)]
    filled = that_filled_a_block(make_set(*members, block_size=block_size).rows())
    assert [(r.request_id, num) for r, num in filled] == [(f"r{num}", num) for num in prompts]


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


def test_the_seat_of_one_that_left_keeps_the_token_of_the_one_that_took_it():
    a, b = caught_up("a", prompt=3), caught_up("b", prompt=[4, 5, 6])
    decodes = make_set(a)
    rows = decodes.rows()
    decodes.advance()
    decodes.leave(a)
    decodes.join(b, BLOCK_IDS)
    decodes.append_tokens(rows, [99])
    assert decodes.rows().token_ids.tolist() == [6]
    assert decodes.violations() == []
