"""The set of requests that run: where each stands, and what is counted of them."""

import pytest

from engine.request import Priority, Request
from engine.scheduling.running_set import RunningSet
from tests.engine.builders import Residues, make_config, make_request

BLOCK_IDS = [4, 2]


def make_set(*requests: Request, **config) -> RunningSet:
    running = RunningSet(make_config(**config))
    for request in requests:
        running.join(request)
    return running


def caught_up(request_id: str = "r", **others) -> Request:
    request = make_request(request_id, **others)
    request.num_pending_tokens = 1
    return request


def places(running: RunningSet) -> dict[str, list[str]]:
    """The names of those in each place; places that are empty are left out."""
    found = {
        "runs": list(running.requests),
        "catches up": list(running.catching_up),
        "decodes": [request.request_id for request in running.decodes.requests],
        "ends": list(running.ending),
    }
    return {place: names for place, names in found.items() if names}


@pytest.mark.parametrize(("slots", "budget", "most"), [(8, 32, 8), (8, 4, 4), (3, 3, 3)])
def test_no_more_may_run_than_there_are_slots_or_tokens_in_a_step(slots, budget, most):
    running = make_set(max_num_seqs=slots, max_num_batched_tokens=budget)
    assert running.max_requests == most


def test_one_that_joins_catches_up():
    running = make_set(make_request("a"), make_request("b"))
    assert places(running) == {"runs": ["a", "b"], "catches up": ["a", "b"]}
    assert len(running) == 2


def test_one_that_has_caught_up_decodes_until_it_gets_a_draft_and_again_when_that_is_checked():
    running = make_set(request := caught_up("a"))
    running.start_decoding(request, BLOCK_IDS)
    assert places(running) == {"runs": ["a"], "decodes": ["a"]}
    running.stop_decoding(request)
    assert places(running) == {"runs": ["a"], "catches up": ["a"]}
    running.start_decoding(request, BLOCK_IDS)
    assert places(running) == {"runs": ["a"], "decodes": ["a"]}
    assert running.decodes.violations() == []


@pytest.mark.parametrize("decodes", [False, True], ids=["catching up", "decoding"])
def test_one_that_leaves_is_nowhere(decodes):
    running = make_set(request := caught_up("a"))
    if decodes:
        running.start_decoding(request, BLOCK_IDS)
    running.leave(request)
    assert places(running) == {}
    assert not running


@pytest.mark.parametrize("decodes", [False, True], ids=["catching up", "decoding"])
def test_one_that_will_end_gives_its_slot_free_and_leaves_once_more_when_it_has_ended(decodes):
    running = make_set(ending := caught_up("a", priority=Priority.LOW), make_request("b"))
    if decodes:
        running.start_decoding(ending, BLOCK_IDS)
    running.expect_end(ending)
    assert places(running) == {"runs": ["b"], "catches up": ["b"], "ends": ["a"]}
    assert not running.has_class_below(Priority.NORMAL)
    running.leave(ending)
    assert places(running) == {"runs": ["b"], "catches up": ["b"]}
    assert running.has_class_below(Priority.HIGH)


def test_a_class_is_below_only_those_that_are_strictly_better():
    running = make_set(request := make_request("a", priority=Priority.NORMAL))
    below = [priority for priority in Priority if running.has_class_below(priority)]
    assert below == [Priority.HIGH, Priority.CRITICAL]
    running.leave(request)
    assert not any(running.has_class_below(priority) for priority in Priority)


@pytest.mark.parametrize(
    ("others", "needs"),
    [({}, False), ({"presence_penalty": 0.5}, True), ({"constraint": Residues()}, True)],
    ids=["plain", "penalty", "constraint"],
)
def test_tokens_are_needed_while_one_runs_whose_next_token_depends_on_them(others, needs):
    running = make_set(make_request("plain"), request := make_request("a", **others))
    assert running.needs_tokens is needs
    running.leave(request)
    assert not running.needs_tokens
