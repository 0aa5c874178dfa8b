"""The clients that share their reads are held to every test of the plain client."""

from inspect import signature

import pytest

from quire import Client
from quire.client.reader import SharedReadsBroker
from tests.quire.client import test_client, test_conflicts, test_groups, test_overdue
from tests.quire.loop_face import blocking_client
from tests.quire.wire import test_choices, test_history, test_times

_SUITE = {
    name: test
    for suite in (
        test_choices,
        test_client,
        test_conflicts,
        test_groups,
        test_history,
        test_overdue,
        test_times,
    )
    for name, test in vars(suite).items()
    if name.startswith("test_")
}
#: What says nothing about another client: it has none, or makes a plain one of its own.
_LEFT_OUT = {
    test_choices: {
        "test_a_queue_that_takes_some_choices_only_says_which",
        "test_no_choice_is_sent_where_one_of_them_is_too_long",
        "test_the_seeds_of_choices_are_the_same_for_ever",
    },
    test_client: {
        "test_a_full_queue_is_a_typed_error",
        "test_a_client_made_from_a_url_closes_what_it_opened",
    },
    test_conflicts: {
        "test_of_a_queue_of_shards_each_tells_of_its_requests",
        "test_so_it_does_where_the_id_is_made_of_the_key",
    },
    test_groups: {
        "test_a_group_takes_members_later_and_outlives_them_all",
        "test_an_id_has_a_group_or_none",
    },
    test_history: {
        "test_every_entry_and_the_record_carry_the_hash_of_the_log_so_far",
        "test_recorded_hashes_are_computed_as_they_were",
        "test_the_hash_of_two_parts_follows_from_both",
        "test_the_numbers_are_exact_in_lua",
    },
    test_overdue: {
        "test_who_may_only_read_waits_for_a_worker",
        "test_a_hundred_deadlines_at_once_take_a_few_connections",
    },
    test_times: {
        "test_a_time_that_is_no_number_is_damage",
        "test_an_entry_of_an_earlier_version_has_no_time",
        "test_the_times_of_many_requests_of_one_commit_are_equal",
    },
}
_BORROWED = _SUITE.keys() - set().union(*_LEFT_OUT.values())

globals().update({name: test for name, test in _SUITE.items() if name in _BORROWED})


@pytest.fixture
def connection(real_connection):
    """The suites themselves show what every server does with these commands."""
    return real_connection


@pytest.fixture(params=["event loop", "threads"])
def client(request, connection, broker, monkeypatch):
    # How often an idle reader looks whether the request is still there.
    for module in ("handle", "handle_async", "group_handle", "group_handle_async"):
        monkeypatch.setattr(f"quire.client.{module}.MAX_BLOCK_SECONDS", 0.1)
    if request.param == "threads":
        yield Client(SharedReadsBroker(connection, queue=broker.keys.queue))
        return
    with blocking_client(connection, queue=broker.keys.queue) as faced:
        yield faced


def test_all_of_each_suite_is_borrowed_but_what_is_left_out():
    for suite, left_out in _LEFT_OUT.items():
        tests = {name for name in vars(suite) if name.startswith("test_")}
        assert left_out == tests - _BORROWED
        assert all(globals()[name] is vars(suite)[name] for name in tests - left_out)


def test_what_is_borrowed_is_about_the_client_it_is_given():
    assert [name for name in _BORROWED if "client" not in signature(_SUITE[name]).parameters] == []
