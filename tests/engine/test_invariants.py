"""The laws can fail: each kind of damage that they exist for is reported."""

import pytest

from engine.request import RequestState
from tests.engine.builders import Machine, make_config, make_request


@pytest.fixture
def machine() -> Machine:
    machine = Machine(make_config(check_invariants=False))
    machine.add(make_request("a", prompt=9, max_tokens=20))
    machine.step()
    assert machine.engine.violations() == []
    return machine


def test_a_block_freed_behind_the_back_of_its_table_is_found(machine):
    cache = machine.engine._scheduler.kv_cache
    cache.pool.free([cache.block_ids("a")[0]])
    assert "block 0 has other references than table entries" in machine.engine.violations()


def test_a_block_that_moved_to_another_table_is_found_although_the_sums_agree(machine):
    cache = machine.engine._scheduler.kv_cache
    table = cache._tables["a"]
    cache.pool.free([table.device_block_ids[0]])
    cache.pool.touch([table.device_block_ids[-1]])
    assert "block 0 has other references than table entries" in machine.engine.violations()


def test_a_table_that_has_one_block_twice_is_found(machine):
    cache = machine.engine._scheduler.kv_cache
    table = cache._tables["a"]
    cache.pool.free([table.device_block_ids[0]])
    table.device_block_ids[0] = table.device_block_ids[-1]
    cache.pool.touch([table.device_block_ids[-1]])
    assert "a table has one block twice" in machine.engine.violations()


def test_a_block_that_is_free_twice_is_found(machine):
    pool = machine.engine._scheduler.kv_cache.pool
    pool._blank.append(pool._blank[0])
    assert any("free twice" in law for law in machine.engine.violations())


def test_a_table_with_too_few_or_too_many_blocks_is_found(machine):
    cache = machine.engine._scheduler.kv_cache
    table = cache._tables["a"]
    (extra,) = cache.pool.allocate(1)
    table.device_block_ids.append(extra)
    assert "a: holds a whole block it does not need" in machine.engine.violations()
    for _ in range(2):
        cache.pool.free([table.device_block_ids.pop()])
    assert "a: has fewer slots than computed tokens" in machine.engine.violations()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_no_block_is_free_while_a_step_computes_with_it(mode):
    config = make_config(
        num_blocks=10, num_host_blocks=10, preemption_mode=mode, check_invariants=False
    )
    machine = Machine(config)
    pool = machine.engine._scheduler.kv_cache.pool
    seen = []

    # An error in here would be taken for one of the step.
    def note(batch):
        planned = {block for row in batch.rows for block in row.block_ids}
        planned.update(copy.destination for copy in batch.swap_in)
        free = {*pool._blank, *pool._cached}
        seen.append((bool(planned and free), planned & free))

    machine.runner._before_run = note
    machine.add(*(make_request(f"r{index}", prompt=9, max_tokens=12) for index in range(6)))
    machine.run()
    assert sum(has_both for has_both, _ in seen) > 10
    assert [wrong for _, wrong in seen if wrong] == []
    assert getattr(machine.engine.snapshot(), f"preemptions_{mode}") > 0


def test_a_forgotten_promise_is_found(machine):
    machine.engine._scheduler.kv_cache.num_promised += 1
    assert "promised blocks do not add up" in machine.engine.violations()


def test_a_counter_that_ran_ahead_is_found(machine):
    request = machine.engine._scheduler.requests["a"]
    request.num_computed_tokens = request.num_tokens
    assert any("a: computed 10 of 10" in law for law in machine.engine.violations())


def test_a_decode_that_is_also_catching_up_is_found(machine):
    scheduler = machine.engine._scheduler
    scheduler.running.catching_up["a"] = scheduler.requests["a"]
    found = machine.engine.violations()
    assert "catching up + decodes != running" in found
    assert "a: its pending tokens contradict whether it is catching up" in found


def test_a_token_appended_behind_the_back_of_the_decodes_is_found(machine):
    machine.engine._scheduler.requests["a"].output_token_ids.append(7)
    assert "a: 1 pending of 11 tokens, in a decode column of 10" in machine.engine.violations()


def test_a_state_that_contradicts_the_running_set_is_found(machine):
    machine.engine._scheduler.requests["a"].state = RequestState.WAITING
    assert any("contradicts the running set" in law for law in machine.engine.violations())


def test_a_request_that_vanished_without_giving_its_blocks_back_is_found(machine):
    scheduler = machine.engine._scheduler
    del scheduler.requests["a"], scheduler.running.requests["a"]
    assert "1 finished requests hold blocks" in machine.engine.violations()


def test_the_fake_cache_notices_a_corrupted_block(machine):
    block_ids = machine.engine._scheduler.kv_cache.block_ids("a")
    machine.runner._device[block_ids[0]] = list(machine.runner._device[block_ids[1]])
    machine.step()
    assert "corrupted cache" in machine.outputs[-1].error


def test_with_the_check_switched_on_a_broken_law_stops_the_test():
    machine = Machine(make_config(check_invariants=True))
    machine.add(make_request("a", max_tokens=20))
    machine.engine._scheduler.kv_cache.num_promised += 1
    with pytest.raises(AssertionError, match="promised blocks"):
        machine.step()


def test_a_token_that_is_expected_when_nothing_is_in_flight_is_found(machine):
    machine.engine._scheduler.requests["a"].expects_token = True
    assert "a: a token is expected between two steps" in machine.engine.violations()


def test_a_request_left_behind_at_its_end_is_found(machine):
    scheduler = machine.engine._scheduler
    scheduler.running.expect_end(scheduler.requests["a"])
    assert "tokens are expected between two steps" in machine.engine.violations()
