"""The acceptance cases that the reference systems define, each against the real engine."""

import pytest

from engine.cache.block_pool import BlockPool
from engine.engine import Engine
from engine.errors import DuplicateRequest
from engine.fake_runner import FakeRunner
from engine.request import FinishReason, Priority
from tests.engine.builders import Machine, expected_tokens, make_config, make_request


def test_the_four_priorities_are_ordered_and_normal_is_the_default():
    assert Priority.LOW < Priority.NORMAL < Priority.HIGH < Priority.CRITICAL
    assert make_request().priority is Priority.NORMAL


def test_a_request_is_complete_after_max_tokens():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=5))
    machine.run()
    assert (len(machine.tokens("a")), machine.finish_reason("a")) == (5, FinishReason.LENGTH)


def test_the_full_flow_of_three_requests_with_eight_slots_and_128_blocks():
    machine = Machine(make_config(max_num_seqs=8, num_blocks=128, block_size=16))
    requests = [make_request(f"r{index}", prompt=10, max_tokens=5) for index in range(3)]
    machine.add(*requests)
    machine.run()
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_a_new_request_joins_while_the_first_one_runs():
    machine = Machine(make_config())
    first, second = make_request("first", max_tokens=10), make_request("second", max_tokens=3)
    machine.add(first)
    machine.step()
    machine.add(second)
    machine.run()
    ended = [output.request_id for output in machine.outputs if output.finish_reason]
    assert ended == ["second", "first"]
    assert machine.tokens("first") == expected_tokens(first)


def test_the_tokens_of_a_mixed_plan_are_the_chunk_and_one_per_decode():
    machine = Machine(make_config())
    machine.add(make_request("decoding", prompt=3, max_tokens=4))
    machine.step()
    machine.add(make_request("new", prompt=5))
    machine.step()
    assert machine.batches[-1].num_tokens == 5 + 1


def test_a_step_is_prefill_decode_or_mixed_by_what_it_computes():
    machine = Machine(make_config())
    machine.add(make_request("first", prompt=3, max_tokens=3))
    seen = []
    for _ in range(3):
        machine.step()
        step = machine.engine.snapshot().last_step
        seen.append((step.kind, step.num_prefill_tokens, step.num_decode_tokens, step.num_tokens))
        if len(seen) == 1:
            machine.add(make_request("second", prompt=5, max_tokens=4))
    assert seen == [("prefill", 3, 0, 3), ("mixed", 5, 1, 6), ("decode", 0, 2, 2)]


def test_the_fifth_request_of_four_slots_waits():
    machine = Machine(make_config(max_num_seqs=4))
    machine.add(*(make_request(f"r{index}") for index in range(5)))
    machine.step()
    seen = machine.engine.snapshot()
    assert (seen.num_running, seen.num_waiting) == (4, 1)


def test_a_pool_hands_out_what_it_has_and_takes_it_back():
    pool = BlockPool(4)
    pool.free(pool.allocate(4))
    assert pool.num_free == 4
    pool.allocate(4)
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_three_requests_run_at_once_and_one_that_is_removed_is_gone():
    machine = Machine(make_config())
    machine.add(*(make_request(f"r{index}", max_tokens=6) for index in range(3)))
    machine.step()
    machine.engine.abort("r1")
    machine.step()
    assert {row.request_id for row in machine.batches[-1].rows} == {"r0", "r2"}


def test_a_prompt_of_ten_tokens_is_computed_in_chunks_of_four_four_and_two():
    machine = Machine(make_config(max_num_batched_tokens=4))
    machine.add(make_request("a", prompt=10, max_tokens=1))
    machine.run()
    assert [batch.num_tokens for batch in machine.batches] == [4, 4, 2]


def test_an_engine_has_work_exactly_while_a_request_is_alive():
    config = make_config()
    engine = Engine(config, FakeRunner(num_blocks=64, block_size=4))
    assert not engine.has_work()
    engine.add_request(make_request("a", max_tokens=1))
    assert engine.has_work()
    engine.step(lambda: 0.0)
    assert not engine.has_work()


def test_an_identifier_is_unique_among_the_living():
    machine = Machine(make_config())
    machine.add(make_request("a"))
    with pytest.raises(DuplicateRequest):
        machine.add(make_request("a"))
