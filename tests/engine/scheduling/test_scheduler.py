"""What the scheduler plans, as literal tables: a change of policy shows as a readable difference.

Each line of a trace is one step: tokens per request, then who waits, who is preempted, free blocks.
"""

import pytest

from engine.request import Priority
from tests.engine.builders import Machine, make_config, make_request


def trace(machine: Machine) -> list[str]:
    """Run until idle; one line per step."""
    lines = []
    while machine.engine.has_work():
        machine.step()
        batch, seen = machine.batches[-1], machine.engine.snapshot()
        rows = " ".join(f"{row.request_id}:{len(row.token_ids)}" for row in batch.rows)
        free = seen.num_blank_blocks + seen.num_cached_blocks
        lines.append(f"{rows} | w{seen.num_waiting} p{seen.num_preempted} f{free}")
    return lines


def test_a_prompt_is_computed_in_chunks_and_its_last_chunk_yields_the_first_token():
    machine = Machine(make_config(max_num_batched_tokens=4))
    machine.add(make_request("a", prompt=10, max_tokens=2))
    assert trace(machine) == [
        "a:4 | w0 p0 f63",
        "a:4 | w0 p0 f62",
        "a:2 | w0 p0 f61",
        "a:1 | w0 p0 f64",
    ]
    assert [len(output.token_ids) for output in machine.outputs] == [1, 1]


def test_a_threshold_bounds_the_chunk_of_one_request_so_that_prompts_share_a_step():
    machine = Machine(make_config(max_num_batched_tokens=8, long_prefill_token_threshold=4))
    machine.add(make_request("a", prompt=12), make_request("b", prompt=12))
    machine.step()
    assert [len(row.token_ids) for row in machine.batches[-1].rows] == [4, 4]


def test_equal_priorities_are_served_in_the_order_of_arrival():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(*(make_request(name, max_tokens=1) for name in "cab"))
    machine.run()
    assert [output.request_id for output in machine.outputs] == list("cab")


def test_the_better_class_is_admitted_first():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(
        make_request("low", max_tokens=1, priority=Priority.LOW),
        make_request("high", max_tokens=1, priority=Priority.HIGH),
        make_request("critical", max_tokens=1, priority=Priority.CRITICAL),
    )
    machine.run()
    assert [output.request_id for output in machine.outputs] == ["critical", "high", "low"]


def test_nobody_overtakes_a_blocked_head_of_its_own_class():
    machine = Machine(make_config(num_blocks=4))
    machine.add(make_request("a", prompt=7, max_tokens=4))
    machine.step()
    machine.add(make_request("large", prompt=12, arrival=1), make_request("s", prompt=1, arrival=2))
    machine.step()
    assert [row.request_id for row in machine.batches[-1].rows] == ["a"]


def test_memory_preemption_takes_the_last_in_the_queue_and_keeps_its_place():
    machine = Machine(make_config(num_blocks=4, preemption_mode="recompute"))
    machine.add(
        make_request("a", prompt=7, max_tokens=6), make_request("b", prompt=7, max_tokens=6)
    )
    assert trace(machine) == [
        "a:7 b:7 | w0 p0 f0",
        "a:1 b:1 | w0 p0 f0",
        "a:1 | w0 p1 f1",
        "a:1 | w0 p1 f1",
        "a:1 | w0 p1 f1",
        "a:1 | w0 p1 f4",
        # The first block of b was never evicted: only five of its nine tokens are computed again.
        "b:5 | w0 p0 f1",
        "b:1 | w0 p0 f1",
        "b:1 | w0 p0 f1",
        "b:1 | w0 p0 f4",
    ]


def test_preemption_by_swap_moves_blocks_and_computes_nothing_twice():
    machine = Machine(make_config(num_blocks=4, num_host_blocks=4, preemption_mode="swap"))
    machine.add(
        make_request("a", prompt=7, max_tokens=6), make_request("b", prompt=7, max_tokens=6)
    )
    machine.run()
    assert [len(batch.swap_out) for batch in machine.batches if batch.swap_out] == [2]
    assert [len(batch.swap_in) for batch in machine.batches if batch.swap_in] == [2]
    assert sum(batch.num_tokens for batch in machine.batches) == 2 * (7 + 6 - 1)


def test_equal_classes_never_preempt_each_other_for_admission():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("a", max_tokens=5))
    machine.step()
    machine.add(make_request("b", max_tokens=1, arrival=1.0))
    machine.run()
    assert machine.engine.snapshot().preemptions_recompute == 0


def test_what_a_preempted_decode_would_have_taken_goes_to_the_one_it_gives_way_to():
    machine = Machine(make_config(max_num_seqs=1, max_num_batched_tokens=4))
    machine.add(make_request("low", prompt=3, max_tokens=3, priority=Priority.LOW))
    machine.step()
    machine.add(make_request("high", prompt=9, max_tokens=1, priority=Priority.HIGH, arrival=1.0))
    assert trace(machine) == [
        "high:4 | w0 p1 f63",
        "high:4 | w0 p1 f62",
        "high:1 | w0 p1 f64",
        "low:4 | w0 p0 f63",
        "low:1 | w0 p0 f64",
    ]


@pytest.mark.parametrize("running", list(Priority))
@pytest.mark.parametrize("waiting", list(Priority))
@pytest.mark.parametrize("age", [0, 1000])
def test_at_any_age_a_request_gives_way_to_every_better_class_and_to_no_other(
    running, waiting, age
):
    machine = Machine(make_config(max_num_seqs=1, aging_seconds=30.0))
    machine.add(make_request("bulk", max_tokens=9, priority=running, arrival=-age))
    machine.step()
    machine.add(make_request("other", max_tokens=1, priority=waiting, arrival=machine.now))
    machine.step()
    first = "other" if waiting > running else "bulk"
    assert [row.request_id for row in machine.batches[-1].rows] == [first]
    machine.run()
    assert len(machine.tokens("bulk")) == 9


def test_old_bulk_gives_way_comes_back_to_its_place_and_gains_a_token_each_time():
    """Two urgent requests at once: the second one overtakes what gave way to the first."""
    machine = Machine(make_config(max_num_seqs=2, aging_seconds=1.0, enable_prefix_caching=False))
    for name in ("a", "b"):
        machine.add(make_request(name, prompt=2, max_tokens=6, priority=Priority.LOW, arrival=-9))
    machine.step()
    for name in ("x", "y", "z"):
        machine.add(
            make_request(name, prompt=1, max_tokens=2, priority=Priority.HIGH, arrival=machine.now)
        )
    assert trace(machine) == [
        "x:1 y:1 | w1 p2 f62",
        "x:1 y:1 | w1 p2 f64",
        # By their age a and b come first; z waits until one of them has gained a token.
        "a:3 b:3 | w1 p0 f62",
        "a:1 z:1 | w0 p1 f62",
        "a:1 z:1 | w0 p1 f62",
        "a:1 b:4 | w0 p0 f61",
        "a:1 b:1 | w0 p0 f62",
        "b:1 | w0 p0 f62",
        "b:1 | w0 p0 f64",
    ]


def test_small_urgent_requests_do_not_starve_a_large_old_one_that_waits_for_memory():
    """They overtake it only in the place of bulk that runs, which gains a token each time."""
    low, high = Priority.LOW, Priority.HIGH
    machine = Machine(make_config(num_blocks=6, aging_seconds=1.0))
    machine.add(make_request("a", prompt=4, max_tokens=4, priority=low, arrival=-20))
    machine.step()
    machine.add(make_request("large", prompt=23, max_tokens=1, priority=low, arrival=-10))
    rows = []
    for index in range(8):
        name = f"u{index}"
        machine.add(make_request(name, prompt=1, max_tokens=2, priority=high, arrival=machine.now))
        machine.step()
        rows.append(
            " ".join(f"{r.request_id}:{len(r.token_ids)}" for r in machine.batches[-1].rows)
        )
    assert rows == [
        "u0:1",
        "u0:1 a:1",
        "u1:1",
        "u1:1 a:2",
        "u2:1",
        "u2:1 a:3",
        "large:23",
        "u3:1 u4:1 u5:1 u6:1 u7:1",
    ]


def test_a_decode_of_old_bulk_takes_no_block_from_an_urgent_request():
    machine = Machine(make_config(num_blocks=4, aging_seconds=1.0))
    machine.add(make_request("bulk", prompt=7, max_tokens=6, priority=Priority.LOW, arrival=-9))
    machine.step()
    machine.add(make_request("urgent", prompt=7, max_tokens=2, priority=Priority.HIGH, arrival=1))
    assert trace(machine) == [
        "bulk:1 urgent:7 | w0 p0 f0",
        "urgent:1 | w0 p1 f4",
        "bulk:1 | w0 p0 f1",
        "bulk:1 | w0 p0 f1",
        "bulk:1 | w0 p0 f1",
        "bulk:1 | w0 p0 f4",
    ]


def test_an_urgent_prompt_goes_before_a_long_old_one_which_gets_on_all_the_same():
    machine = Machine(make_config(max_num_batched_tokens=8, aging_seconds=1.0))
    machine.add(make_request("bulk", prompt=30, max_tokens=1, priority=Priority.LOW, arrival=-9))
    machine.step()
    machine.add(make_request("urgent", prompt=15, max_tokens=2, priority=Priority.HIGH, arrival=1))
    assert trace(machine) == [
        "urgent:7 bulk:1 | w0 p0 f59",
        "urgent:7 bulk:1 | w0 p0 f57",
        "urgent:1 bulk:7 | w0 p0 f55",
        "urgent:1 bulk:7 | w0 p0 f58",
        "bulk:6 | w0 p0 f64",
    ]


def test_every_running_request_gets_on_in_every_step_however_small_the_budget():
    machine = Machine(make_config(max_num_seqs=8, max_num_batched_tokens=4))
    machine.add(*(make_request(f"r{index}", prompt=6, max_tokens=9) for index in range(8)))
    while machine.engine.has_work():
        running = set(machine.engine._scheduler.running.requests)
        machine.step()
        batch = machine.batches[-1]
        assert batch.num_tokens <= 4
        assert running <= {row.request_id for row in batch.rows}


@pytest.mark.parametrize("num_blocks", [8, 9])
def test_the_watermark_leaves_air_for_the_running_but_not_in_an_empty_engine(num_blocks):
    machine = Machine(make_config(num_blocks=num_blocks, watermark=0.25))
    machine.add(make_request("whole", prompt=num_blocks * 4 - 1, max_tokens=1))
    machine.run()
    machine.add(make_request("a", prompt=4 * (num_blocks - 3), max_tokens=3))
    machine.step()
    machine.add(make_request("b", prompt=4, max_tokens=3, arrival=machine.now))
    machine.step()
    assert [row.request_id for row in machine.batches[-1].rows] == ["a"]


def test_the_same_calls_give_the_same_plans():
    def plans():
        machine = Machine(make_config(num_blocks=6, num_host_blocks=3, max_num_seqs=3))
        machine.add(*(make_request(f"r{index}", prompt=3 + index) for index in range(6)))
        batches = machine.run().batches
        return [(batch.rows, batch.swap_out, batch.swap_in) for batch in batches]

    assert plans() == plans()
