"""One regression test for each bug of the reference systems that an engine could have, by its id.

B01 belongs to the wire, B20 to B23, B35 and B64 to the model runner, B33, B37, B63 and B66 to the
service: their tests stand there.
"""

import copy
import dataclasses

import pytest

from engine.cache.block_pool import BlockPool
from engine.errors import RequestRejected
from engine.request import LEGAL_TRANSITIONS, FinishReason, Priority, RequestState
from tests.engine.builders import Machine, expected_tokens, make_config, make_request


def ends(machine: Machine) -> dict[str, FinishReason]:
    return {o.request_id: o.finish_reason for o in machine.outputs if o.finish_reason}


def test_b02_what_can_never_run_does_not_block_the_head_of_the_queue():
    machine = Machine(make_config(num_blocks=4))
    for never in (make_request("e", prompt=[]), make_request("big", prompt=99)):
        with pytest.raises(RequestRejected):
            machine.add(never)
    with pytest.raises(AssertionError):
        make_request("z", max_tokens=0)
    machine.add(make_request("good"))
    assert ends(machine.run()) == {"good": FinishReason.LENGTH}


def test_b03_and_b31_eos_stop_and_the_model_length_all_end_a_request():
    machine = Machine(make_config(max_model_len=12))
    machine.runner.script.tokens = {"eos": {1: 0}, "stop": {1: 77}}
    machine.add(
        make_request("eos", max_tokens=50),
        make_request("stop", max_tokens=50, stop_token_ids=(77,)),
        make_request("length", max_tokens=50),
    )
    assert ends(machine.run()) == {"eos": "eos", "stop": "stop", "length": "length"}


def test_b04_a_chunk_never_reaches_past_the_known_tokens():
    machine = Machine(make_config(max_num_batched_tokens=7))
    machine.add(make_request("a", prompt=10, max_tokens=3))
    machine.run()
    rows = [row for batch in machine.batches for row in batch.rows]
    assert [(row.start, row.end) for row in rows] == [(0, 7), (7, 10), (10, 11), (11, 12)]


def test_b05_b11_and_b12_times_are_frozen_complete_and_never_negative():
    machine = Machine(make_config())
    machine.add(make_request("done", max_tokens=3), make_request("aborted", max_tokens=30))
    machine.step()
    machine.step()
    machine.engine.abort("aborted")
    machine.run()
    finals = [output.request for output in machine.outputs if output.finish_reason]
    frozen = [copy.copy(request.times) for request in finals]
    machine.add(make_request("later", max_tokens=9))
    machine.run()
    for request, before in zip(finals, frozen, strict=True):
        times = request.times
        assert dataclasses.asdict(times) == dataclasses.asdict(before)
        assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished


def test_b06_b07_and_b42_each_position_is_computed_once_and_fed_its_own_token():
    machine = Machine(make_config())
    request = make_request("a", prompt=6, max_tokens=5)
    machine.add(request)
    machine.run()
    fed = [
        (row.start + offset, token_id)
        for batch in machine.batches
        for row in batch.rows
        for offset, token_id in enumerate(row.token_ids)
    ]
    whole = [*request.prompt_token_ids, *expected_tokens(request)]
    assert fed == list(enumerate(whole[:-1]))


def test_b08_a_row_sees_the_block_table_as_it_is_after_growth_and_swap():
    config = make_config(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    machine = Machine(config)
    requests = [make_request(name, prompt=7, max_tokens=9) for name in "ab"]
    machine.add(*requests)
    machine.run()
    assert machine.engine.snapshot().preemptions_swap > 0
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_b09_an_illegal_transition_is_our_bug_and_finished_is_absorbing():
    assert LEGAL_TRANSITIONS[RequestState.FINISHED] == frozenset()
    with pytest.raises(AssertionError):
        make_request().transition(RequestState.PREEMPTED)


def test_b10_eos_on_the_last_allowed_token_is_not_reported_as_length():
    machine = Machine(make_config())
    machine.runner.script.tokens = {"a": {3: 0}}
    machine.add(make_request("a", max_tokens=4))
    assert ends(machine.run()) == {"a": FinishReason.EOS}


def test_b17_more_requests_run_than_their_max_tokens_could_ever_reserve():
    machine = Machine(make_config(num_blocks=16, max_num_seqs=8))
    machine.add(*(make_request(f"r{index}", prompt=4, max_tokens=40) for index in range(8)))
    machine.step()
    # Reserving prompt + max_tokens, 11 blocks each, would let one run.
    assert machine.engine.snapshot().num_running == 8


def test_b18_the_model_length_is_enforced():
    with pytest.raises(RequestRejected):
        Machine(make_config(max_model_len=8)).add(make_request(prompt=8))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b24_one_slot_and_two_requests_do_not_evict_each_other_for_ever(mode):
    machine = Machine(make_config(max_num_seqs=1, num_host_blocks=16, preemption_mode=mode))
    machine.add(make_request("a", max_tokens=9), make_request("b", max_tokens=9))
    machine.run(max_steps=30)
    assert machine.engine.snapshot().preempted_tokens == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b24_slight_oversubscription_ends_without_thrashing(mode):
    config = make_config(num_blocks=19, num_host_blocks=19, preemption_mode=mode)
    machine = Machine(config)
    requests = [make_request(f"r{index}", prompt=4, max_tokens=17) for index in range(4)]
    machine.add(*requests)
    machine.run(max_steps=80)
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)
    seen = machine.engine.snapshot()
    assert 1 <= seen.preemptions_recompute + seen.preemptions_swap <= 4


def test_b25_the_second_chunk_knows_its_position():
    machine = Machine(make_config(max_num_batched_tokens=4))
    machine.add(make_request("a", prompt=8))
    machine.step()
    machine.step()
    assert machine.batches[1].rows[0].start == 4


def test_b26_a_request_is_in_a_batch_once_and_the_budget_is_kept():
    config = make_config(num_blocks=10, num_host_blocks=10, preemption_mode="swap")
    machine = Machine(config)
    machine.add(*(make_request(f"r{index}", prompt=9, max_tokens=12) for index in range(6)))
    machine.run()
    for batch in machine.batches:
        ids = [row.request_id for row in batch.rows]
        assert len(ids) == len(set(ids)) <= config.max_num_seqs
        assert batch.num_tokens <= config.max_num_batched_tokens


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("prompt", [511, 512, 513, 1024, 1025, 4000])
def test_b28_chunk_size_never_shows_in_the_output(chunk, prompt):
    config = make_config(
        num_blocks=300,
        block_size=16,
        max_model_len=8192,
        max_num_batched_tokens=chunk,
        check_invariants=False,
    )
    machine = Machine(config)
    request = make_request("a", prompt=prompt, max_tokens=3)
    machine.add(request)
    machine.run(max_steps=4100)
    assert machine.tokens("a") == expected_tokens(request)


def test_b29_a_preempted_request_longer_than_the_budget_resumes_in_chunks():
    config = make_config(
        num_blocks=16,
        max_num_batched_tokens=4,
        preemption_mode="recompute",
        enable_prefix_caching=False,
    )
    machine = Machine(config)
    requests = [make_request(name, prompt=20, max_tokens=20) for name in "ab"]
    machine.add(*requests)
    machine.run()
    assert machine.engine.snapshot().preemptions_recompute > 0
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_b30_the_end_is_reported_exactly_once_and_the_indices_are_contiguous():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=4))
    machine.run()
    assert [output.start for output in machine.outputs] == [0, 1, 2, 3]
    assert [o.finish_reason for o in machine.outputs] == [None, None, None, "length"]


def test_b32_the_first_cancel_of_a_running_request_frees_its_blocks():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=40))
    machine.step()
    machine.engine.abort("a")
    machine.step()
    assert ends(machine) == {"a": FinishReason.CANCELLED}
    assert machine.engine.snapshot().num_owned_blocks == 0


def test_b34_counters_are_measured_and_not_constants():
    machine = Machine(make_config())
    machine.add(make_request("a", prompt=5, max_tokens=4))
    machine.run()
    seen = machine.engine.snapshot()
    assert (seen.steps, seen.generated_tokens, seen.prompt_tokens) == (4, 4, 5)
    assert seen.last_step is not None


def test_b36_a_step_checks_all_guesses_at_once_and_every_right_one_is_output():
    machine = Machine(make_config(num_speculative_tokens=3))
    machine.add(make_request("a", prompt=[5, 6, 7] * 3, max_tokens=12))
    machine.runner.script.tokens["a"] = dict(enumerate([5, 6, 7] * 4))
    assert machine.run().tokens("a") == [5, 6, 7] * 4
    guesses = [sum(row.num_drafted for row in batch.rows) for batch in machine.batches]
    assert guesses == [0, 1, 2, 3, 1]


def test_b38_a_request_that_does_not_fit_yet_keeps_its_place():
    machine = Machine(make_config(num_blocks=8))
    machine.add(make_request("a", prompt=15, max_tokens=10))
    machine.step()
    machine.add(make_request("b", prompt=20, max_tokens=2), make_request("c", prompt=20))
    machine.run()
    assert list(ends(machine)) == ["a", "b", "c"]


def test_b38_a_critical_request_is_found_wherever_it_was_queued():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(*(make_request(f"n{index}", max_tokens=2) for index in range(5)))
    machine.add(make_request("critical", max_tokens=1, priority=Priority.CRITICAL))
    machine.run()
    assert next(iter(ends(machine))) == "critical"


def test_b40_nothing_advances_before_the_device_has_computed_it():
    machine = Machine(make_config())
    machine.add(make_request("a"))
    request = machine.engine._scheduler.requests["a"]
    machine.engine._scheduler.schedule(now=0.0)
    again = machine.engine._scheduler.schedule(now=0.0)
    assert request.num_computed_tokens == 0
    assert again.rows[0].token_ids == request.prompt_token_ids


def test_b41_an_empty_prompt_is_refused_and_no_token_is_made_up():
    with pytest.raises(RequestRejected, match="empty"):
        Machine(make_config()).add(make_request(prompt=[]))


def test_b43_max_tokens_counts_new_tokens_only():
    machine = Machine(make_config())
    machine.add(make_request("a", prompt=60, max_tokens=5))
    machine.run()
    assert len(machine.tokens("a")) == 5


def test_b44_and_b52_a_request_at_its_limit_is_finished_by_the_engine_and_leaves_no_work():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=1))
    machine.step()
    assert not machine.engine.has_work()


def test_b45_a_waiting_request_that_was_aborted_never_runs():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("a", max_tokens=2), make_request("b"))
    machine.engine.abort("b")
    machine.run()
    assert all(row.request_id == "a" for batch in machine.batches for row in batch.rows)


def test_b46_a_burst_of_arrivals_keeps_the_budget():
    machine = Machine(make_config(max_num_batched_tokens=32))
    machine.add(*(make_request(f"r{index}", prompt=16) for index in range(8)))
    machine.run()
    assert max(batch.num_tokens for batch in machine.batches) == 32


def test_b47_sixteen_requests_on_eight_places_all_end():
    machine = Machine(make_config(max_num_seqs=8))
    machine.add(*(make_request(f"r{index}", max_tokens=10) for index in range(16)))
    machine.run(max_steps=100)
    assert len(ends(machine)) == 16


def test_b48_arrivals_never_stall_a_running_stream():
    machine = Machine(make_config(max_num_batched_tokens=8))
    machine.add(make_request("stream", prompt=1, max_tokens=30))
    machine.step()
    for index in range(20):
        machine.add(make_request(f"burst{index}", prompt=16, max_tokens=1))
        machine.step()
        assert "stream" in {row.request_id for row in machine.batches[-1].rows}


def test_b51_a_finished_request_takes_no_further_token():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=1))
    machine.step()
    ended = machine.outputs[-1].request
    with pytest.raises(AssertionError):
        ended.transition(RequestState.RUNNING)


def test_b55_utilisation_reports_blocks_and_not_slots():
    machine = Machine(make_config(num_blocks=10, max_num_seqs=2))
    machine.add(make_request("a", prompt=18))
    machine.step()
    assert machine.engine.snapshot().kv_cache_usage == 0.5


def test_b57_a_pool_of_no_blocks_is_refused_by_the_configuration():
    with pytest.raises(AssertionError):
        make_config(num_blocks=0)
    assert BlockPool(0).num_free == 0


def test_b59_the_token_fed_in_decode_is_the_last_one_sampled():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=4))
    machine.run()
    sampled = [token_id for output in machine.outputs for token_id in output.token_ids]
    fed = [batch.rows[0].token_ids[0] for batch in machine.batches[1:]]
    assert fed == sampled[:-1]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b61_the_cause_of_a_preemption_is_admitted_before_its_victim(mode):
    machine = Machine(make_config(max_num_seqs=1, num_host_blocks=16, preemption_mode=mode))
    low = make_request("low", max_tokens=12, priority=Priority.LOW)
    machine.add(low)
    machine.step()
    machine.add(make_request("high", max_tokens=4, priority=Priority.HIGH, arrival=1.0))
    machine.run()
    seen = machine.engine.snapshot()
    assert list(ends(machine)) == ["high", "low"]
    assert seen.preemptions_recompute + seen.preemptions_swap == 1
    assert machine.tokens("low") == expected_tokens(low)


def test_b62_a_finished_request_leaves_nothing_behind():
    machine = Machine(make_config())
    for index in range(50):
        machine.add(make_request(f"r{index}", max_tokens=2))
        machine.run()
    scheduler = machine.engine._scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.kv_cache._tables
    assert not scheduler._waiting._num_entries


def test_b65_every_request_of_a_large_batch_has_its_own_right_length_and_tokens():
    config = make_config(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256)
    machine = Machine(config)
    requests = [
        make_request(f"r{index}", prompt=1 + index, max_tokens=1 + 31 - index)
        for index in range(32)
    ]
    machine.add(*requests)
    machine.run()
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)
