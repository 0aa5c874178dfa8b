"""Requests for a vector of their prompt: planned, computed and ended like every other request."""

import numpy as np
import pytest

from engine.errors import RequestRejected
from engine.fake_runner import FAKE_WIDTH, fake_vector
from engine.request import FinishReason, Pooling, Priority, Request
from tests.engine.builders import Machine, make_config, make_request

POOLS = {"pools": True}
WHOLE = POOLS | {"whole_prompts": True, "enable_prefix_caching": False, "block_size": 32}


def vector_request(request_id: str = "r", *, prompt: int = 5, **others) -> Request:
    request = make_request(request_id, prompt=prompt, max_tokens=1, **others)
    request.pooling = Pooling()
    return request


def vectors_of(machine: Machine) -> dict[str, list[float]]:
    ended = [one for one in machine.outputs if one.finish_reason is FinishReason.POOLED]
    assert len({one.request_id for one in ended}) == len(ended)
    assert all(one.token_ids == () and one.start == 0 for one in ended)
    found = {}
    for one in ended:
        assert one.request.vector is not None
        found[one.request_id] = one.request.vector.tolist()
    return found


def expected(*requests: Request) -> dict[str, list[float]]:
    return {one.request_id: fake_vector(one.prompt_token_ids).tolist() for one in requests}


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("chunk", [0, 3])
def test_each_prompt_gets_its_vector_and_no_token_in_chunks_or_at_once(runs_ahead, chunk):
    config = make_config(**POOLS, long_prefill_token_threshold=chunk, max_num_seqs=3)
    machine = Machine(config, runs_ahead=runs_ahead)
    requests = [vector_request(f"r{length}", prompt=length) for length in (1, 4, 7, 16, 33)]
    machine.add(*requests)
    machine.run()
    assert vectors_of(machine) == expected(*requests)
    snapshot = machine.engine.snapshot()
    assert snapshot.generated_tokens == 0 and snapshot.num_owned_blocks == 0


def test_a_prompt_with_one_token_left_is_not_taken_for_a_decode():
    machine = Machine(make_config(**POOLS, long_prefill_token_threshold=4))
    request = vector_request(prompt=5)
    machine.add(request)
    machine.run()
    assert [len(batch.decodes) for batch in machine.batches if not batch.is_empty] == [0, 0]
    assert vectors_of(machine) == expected(request)


def test_prompts_with_a_common_beginning_share_its_blocks():
    machine = Machine(make_config(**POOLS))
    prompt = list(range(1, 14))
    first, second = (
        make_request(name, prompt=[*prompt, last]) for name, last in (("a", 7), ("b", 8))
    )
    for one in (first, second):
        one.pooling = Pooling()
        machine.add(one)
        machine.run()
    assert second.num_cached_tokens == 12
    assert vectors_of(machine) == expected(first, second)


def test_dimensions_cut_the_vector():
    machine = Machine(make_config(**POOLS))
    request = vector_request()
    request.pooling = Pooling(dimensions=3)
    machine.add(request)
    machine.run()
    assert vectors_of(machine)["r"] == fake_vector(request.prompt_token_ids).tolist()[:3]
    assert FAKE_WIDTH > 3


def test_an_encoder_gets_every_prompt_whole():
    config = make_config(
        **WHOLE, max_model_len=32, num_blocks=4, max_num_seqs=4, max_num_batched_tokens=32
    )
    machine = Machine(config)
    requests = [vector_request(f"r{index}", prompt=1 + 7 * index % 32) for index in range(24)]
    machine.add(*requests)
    machine.run()
    rows = [row for batch in machine.batches for row in batch.catch_up_rows]
    assert [len(row.token_ids) for row in rows] == [len(row.prompt_token_ids) for row in rows]
    assert len(rows) == len(requests)
    assert max(batch.num_tokens for batch in machine.batches) > 25
    assert vectors_of(machine) == expected(*requests)


def test_the_longest_prompt_is_not_passed_over_for_ever_by_short_ones():
    config = make_config(
        **WHOLE, max_model_len=32, num_blocks=4, max_num_seqs=4, max_num_batched_tokens=32
    )
    machine = Machine(config)
    machine.add(vector_request("short0", prompt=3), vector_request("long", prompt=32))
    for index in range(1, 40):
        machine.add(vector_request(f"short{index}", prompt=3, arrival=float(index)))
    machine.run()
    ended = [one.request_id for one in machine.outputs]
    assert ended.index("long") <= 4


def test_a_higher_class_takes_the_slot_of_a_half_computed_prompt():
    config = make_config(**POOLS, max_num_seqs=1, long_prefill_token_threshold=4)
    machine = Machine(config)
    low = vector_request("low", prompt=17, priority=Priority.LOW)
    machine.add(low)
    machine.step()
    high = vector_request("high", prompt=6, priority=Priority.CRITICAL, arrival=1.0)
    machine.add(high)
    machine.run()
    assert low.num_preemptions == 1
    assert list(vectors_of(machine)) == ["high", "low"]
    assert vectors_of(machine) == expected(low, high)


def test_one_row_that_fails_costs_its_own_request_only():
    machine = Machine(make_config(**POOLS))
    machine.runner.script.failing_request_ids.add("bad")
    good, bad = vector_request("good"), vector_request("bad")
    machine.add(good, bad)
    machine.run()
    assert vectors_of(machine) == expected(good)
    assert bad.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize(
    ("config", "request_", "field"),
    [
        (make_config(), vector_request(), "kind"),
        (make_config(**POOLS), make_request(), "kind"),
        (make_config(**POOLS, max_model_len=16), vector_request(prompt=17), "prompt"),
        (make_config(**POOLS, num_blocks=4), vector_request(prompt=17), "prompt"),
    ],
)
def test_what_the_model_cannot_compute_is_refused_with_the_field(config, request_, field):
    with pytest.raises(RequestRejected) as refused:
        Machine(config).add(request_)
    assert refused.value.field == field


def test_a_prompt_may_fill_the_model_length_and_the_cache():
    machine = Machine(make_config(**POOLS, max_model_len=16, num_blocks=4))
    request = vector_request(prompt=16)
    machine.add(request)
    machine.run()
    assert np.array_equal(request.vector, fake_vector(request.prompt_token_ids))


def test_an_abort_ends_a_request_without_a_vector():
    machine = Machine(make_config(**POOLS, long_prefill_token_threshold=2))
    request = vector_request(prompt=9)
    machine.add(request)
    machine.step()
    machine.engine.abort("r")
    machine.run()
    assert request.finish_reason is FinishReason.CANCELLED and request.vector is None
