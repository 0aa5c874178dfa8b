"""The engine from outside: what goes in, what comes out, and what it survives."""

import pytest

from engine.ending import MAX_STALE_DEADLINES
from engine.errors import DeviceFailed, DuplicateRequest, RequestRejected
from engine.fake_runner import Script
from engine.request import FinishReason
from tests.engine.builders import EOS, Machine, expected_tokens, make_config, make_request


class TextOfIds:
    """A TextStream whose text is the ids themselves, and which stops on one of them."""

    def __init__(self, stop_id: int | None = None) -> None:
        self._stop_id = stop_id
        self._text = ""

    def append(self, token_id: int) -> bool:
        self._text += f"{token_id} "
        return token_id == self._stop_id

    def take_text(self, *, final: bool) -> str:
        text, self._text = self._text, ""
        return text


def test_a_request_generates_what_its_runner_says_token_by_token():
    machine = Machine(make_config())
    request = make_request("a", prompt=9, max_tokens=7)
    machine.add(request)
    assert machine.run().tokens("a") == expected_tokens(request)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request(prompt=[]), "prompt"),
        (make_request(prompt=[1, 1000]), "prompt"),
        (make_request(prompt=[-1]), "prompt"),
        (make_request(prompt=256), "prompt"),
        (make_request(allowed_token_ids=(1, 1000)), "allowed_token_ids.1"),
        (make_request(logit_bias=((7, 1.0), (1000, 5.0))), "logit_bias.1000"),
        (make_request(adapter="unheard"), "adapter"),
    ],
    ids=[
        "empty",
        "above the vocabulary",
        "negative",
        "as long as the model",
        "allowed",
        "biased",
        "without its adapter",
    ],
)
def test_what_can_never_be_served_is_refused_at_once_and_alone(request_, field):
    machine = Machine(make_config())
    good = make_request("good")
    machine.add(good)
    with pytest.raises(RequestRejected) as refusal:
        machine.add(request_)
    assert refusal.value.field == field
    assert machine.run().tokens("good") == expected_tokens(good)


def test_requests_of_several_adapters_run_together_and_each_says_what_its_own_says():
    machine = Machine(make_config(adapters=frozenset({"a", "b"})))
    names = (None, "a", "b", "a")
    requests = [
        make_request(f"r{number}", prompt=range(1, 10), adapter=name, max_tokens=9)
        for number, name in enumerate(names)
    ]
    machine.add(*requests)
    machine.run()
    said = [machine.tokens(request.request_id) for request in requests]
    assert said == [expected_tokens(request) for request in requests]
    assert len({tuple(tokens) for tokens in said}) == 3
    assert {row.adapter for batch in machine.batches for row in batch.rows} == {*names}


def test_a_prompt_larger_than_the_whole_pool_is_refused():
    with pytest.raises(RequestRejected, match="KV cache of 8 tokens"):
        Machine(make_config(num_blocks=2)).add(make_request(prompt=8))


def test_an_id_that_is_alive_is_refused_and_may_come_back_when_it_is_not():
    machine = Machine(make_config())
    machine.add(make_request("a"))
    with pytest.raises(DuplicateRequest):
        machine.add(make_request("a"))
    machine.run()
    machine.add(make_request("a"))
    machine.run()


# -- how a generation ends -------------------------------------------------------------------------


def end_of(machine: Machine, **request_fields) -> tuple[FinishReason, int]:
    machine.outputs.clear()
    machine.add(make_request("a", **request_fields))
    machine.run()
    return machine.finish_reason("a"), len(machine.tokens("a"))


def test_length_eos_and_stop_are_told_apart():
    machine = Machine(make_config())
    machine.runner.script.tokens = {"a": {1: EOS, 3: 42}}
    assert end_of(machine, max_tokens=9) == (FinishReason.EOS, 2)
    assert end_of(machine, max_tokens=9, ignore_eos=True, stop_token_ids=(42,)) == ("stop", 4)
    assert end_of(machine, max_tokens=3, ignore_eos=True) == (FinishReason.LENGTH, 3)


def test_an_eos_on_the_last_allowed_token_is_an_eos():
    machine = Machine(make_config())
    machine.runner.script.tokens = {"a": {2: EOS}}
    assert end_of(machine, max_tokens=3) == (FinishReason.EOS, 3)


def test_a_stop_string_ends_the_request_as_soon_as_its_text_is_complete():
    machine = Machine(make_config())
    machine.runner.script.tokens = {"a": {2: 42}}
    assert end_of(machine, max_tokens=9, text=TextOfIds(stop_id=42)) == (FinishReason.STOP, 3)


def test_the_model_length_ends_a_request_before_max_tokens():
    machine = Machine(make_config(max_model_len=10))
    assert end_of(machine, prompt=6, max_tokens=50) == (FinishReason.LENGTH, 4)


def test_nothing_but_a_limit_ends_a_request_before_min_tokens():
    machine = Machine(make_config())
    machine.runner.script.tokens = {"a": {1: EOS, 2: EOS, 3: EOS}}
    assert end_of(machine, max_tokens=9, min_tokens=3) == (FinishReason.EOS, 4)


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_a_deadline_passes_by_the_next_request_of_the_same_id(deadline):
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=1, deadline=5.0))
    machine.run()
    machine.add(make_request("a", max_tokens=9, deadline=deadline))
    machine.run()
    assert machine.now > 5.0
    assert machine.finish_reason("a") is FinishReason.LENGTH


def test_a_deadline_ends_a_request_wherever_it_is():
    machine = Machine(make_config(max_num_seqs=1))
    running = make_request("running", max_tokens=50, deadline=5.0)
    waiting = make_request("waiting", max_tokens=50, deadline=3.0)
    machine.add(running, waiting)
    machine.run()
    assert machine.finish_reason("waiting") is FinishReason.DEADLINE
    assert machine.tokens("waiting") == []
    assert machine.tokens("running") == expected_tokens(running)[:4]


# -- aborts ----------------------------------------------------------------------------------------


def test_an_abort_frees_every_block_within_one_step_in_every_state():
    config = make_config(num_blocks=4, num_host_blocks=4, preemption_mode="swap", max_num_seqs=2)
    machine = Machine(config)
    machine.add(*(make_request(name, prompt=7, max_tokens=20) for name in "abc"))
    for _ in range(3):
        machine.step()
    seen = machine.engine.snapshot()
    assert (seen.num_running, seen.num_preempted, seen.num_waiting) == (1, 1, 1)
    assert seen.num_owned_host_blocks > 0
    for name in "abc":
        machine.engine.abort(name)
    ended = {output.request_id: output.finish_reason for output in machine.step()}
    assert ended == dict.fromkeys("abc", FinishReason.CANCELLED)
    seen = machine.engine.snapshot()
    assert (seen.num_alive, seen.num_owned_blocks, seen.num_owned_host_blocks) == (0, 0, 0)


def test_an_abort_during_the_forward_pass_is_applied_before_its_output():
    machine = Machine(make_config())
    machine.add(make_request("a"), make_request("b"))
    machine.runner._before_run = lambda batch: machine.engine.abort("a")
    outputs = machine.step()
    assert [(o.request_id, len(o.token_ids)) for o in outputs] == [("a", 0), ("b", 1)]


def test_aborting_unknown_and_finished_ids_does_nothing():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=1))
    machine.run()
    machine.engine.abort("a")
    machine.engine.abort("never seen")
    assert machine.step() == []


def test_many_aborted_waiters_leave_no_trace():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("a", max_tokens=3))
    for index in range(500):
        machine.add(make_request(f"w{index}", deadline=1e9))
        machine.engine.abort(f"w{index}")
    machine.step()
    assert machine.engine.snapshot().num_waiting == 0
    assert machine.engine._scheduler._waiting._num_entries < 100
    machine.run()


def test_deadlines_of_those_that_ended_before_are_forgotten():
    machine = Machine(make_config())
    for index in range(2 * MAX_STALE_DEADLINES):
        machine.add(make_request(f"r{index}", max_tokens=1, deadline=1e9))
        machine.step()
    assert machine.engine.snapshot().num_alive == 0
    assert len(machine.engine._endings._deadlines) <= MAX_STALE_DEADLINES + 2


# -- resuming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [1, 4, 7])
def test_a_resumed_request_goes_on_where_the_published_tokens_end(published):
    request = make_request("a", prompt=6, max_tokens=8)
    whole = expected_tokens(request)
    machine = Machine(make_config())
    machine.add(make_request("a", prompt=6, max_tokens=8, output=whole[:published]))
    machine.run()
    assert machine.outputs[0].start == published
    assert whole[:published] + machine.tokens("a") == whole


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ([5, EOS], {}, FinishReason.EOS),
        ([5, 42], {"stop_token_ids": (42,)}, FinishReason.STOP),
        ([5, 42], {"text": TextOfIds(stop_id=42)}, FinishReason.STOP),
        ([5, 6, 7], {"max_tokens": 3}, FinishReason.LENGTH),
    ],
    ids=["eos", "stop token", "stop string", "length"],
)
def test_a_request_whose_last_published_token_ended_it_ends_without_a_further_one(
    output, sampling, reason
):
    machine = Machine(make_config())
    machine.add(make_request("a", output=output, **({"max_tokens": 9} | sampling)))
    machine.run()
    assert (machine.finish_reason("a"), machine.tokens("a")) == (reason, [])
    assert machine.batches == []


def test_text_already_published_is_not_given_out_again():
    machine = Machine(make_config())
    machine.runner.script.tokens = {"a": {2: 9}}
    machine.add(make_request("a", output=[5, 6], max_tokens=3, text=TextOfIds()))
    machine.run()
    assert "".join(output.text for output in machine.outputs) == "9 "


# -- faults ----------------------------------------------------------------------------------------


def test_a_step_that_raises_costs_only_its_culprit():
    machine = Machine(make_config())
    good = [make_request(f"good{index}", max_tokens=6) for index in range(3)]
    machine.add(*good, make_request("bad", max_tokens=6))
    machine.step()
    machine.runner.script.failing_request_ids = {"bad"}
    machine.run()
    assert machine.finish_reason("bad") is FinishReason.ERROR
    assert any("scripted failure" in (output.error or "") for output in machine.outputs)
    for request in good:
        assert machine.tokens(request.request_id) == expected_tokens(request)
    assert machine.engine.snapshot().failed_steps == 1


def test_a_failed_step_that_had_swapped_does_not_swap_again():
    config = make_config(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    machine = Machine(config)
    requests = [make_request(name, prompt=7, max_tokens=6) for name in "ab"]
    machine.add(*requests)
    failed = []

    class FailOnce(Script):
        def raise_if_failing(self, batch):
            if batch.swap_out and not failed:
                failed.append(batch)
                raise ValueError("after the swaps")

    machine.runner.script = FailOnce()
    machine.run()
    assert failed
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_a_device_failure_leaves_the_engine_by_exception():
    machine = Machine(make_config())
    machine.add(make_request("a"))

    def fail(batch):
        raise DeviceFailed("the device is gone")

    machine.runner._before_run = fail
    with pytest.raises(DeviceFailed):
        machine.step()


def test_when_every_row_fails_alone_it_is_the_device_and_not_the_requests():
    machine = Machine(make_config())
    machine.add(make_request("a"), make_request("b"))
    machine.runner.script.failing_request_ids = {"a", "b"}
    with pytest.raises(DeviceFailed):
        machine.step()


def test_a_device_on_which_some_rows_raise_and_the_others_have_no_numbers_is_no_device():
    machine = Machine(make_config())
    machine.add(make_request("a"), make_request("b"))
    machine.runner.script.failing_request_ids = {"a"}
    machine.runner.script.broken_request_ids = {"b"}
    with pytest.raises(DeviceFailed):
        machine.step()


def test_requests_that_fail_by_their_own_arithmetic_never_end_the_worker_however_many():
    machine = Machine(make_config())
    machine.add(make_request("a"), make_request("b"))
    machine.runner.script.broken_request_ids = {"a", "b"}
    machine.run()
    assert {o.request_id: o.finish_reason for o in machine.outputs} == {"a": "error", "b": "error"}


# -- times and counters ----------------------------------------------------------------------------


def test_waiting_prefill_and_decode_add_up_to_the_whole_and_freeze_at_the_end():
    machine = Machine(make_config(max_num_seqs=1, max_num_batched_tokens=4))
    machine.add(make_request("first", max_tokens=2), make_request("a", prompt=8, max_tokens=4))
    machine.run()
    times = next(
        o.request for o in machine.outputs if o.request_id == "a" and o.finish_reason
    ).times
    waiting = times.first_scheduled - times.arrival
    prefill = times.first_token - times.first_scheduled
    decode = times.finished - times.first_token
    assert (waiting, prefill, decode) == (4.0, 1.0, 3.0)
    assert waiting + prefill + decode == times.finished - times.arrival


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


def test_the_snapshot_counts_what_a_known_run_did():
    machine = Machine(make_config(num_blocks=4, preemption_mode="recompute"))
    machine.add(
        make_request("a", prompt=7, max_tokens=6), make_request("b", prompt=7, max_tokens=6)
    )
    machine.run()
    seen = machine.engine.snapshot()
    assert (seen.generated_tokens, seen.prompt_tokens, seen.steps) == (12, 14, 10)
    assert (seen.preemptions_recompute, seen.preempted_tokens) == (1, 8)
    assert (seen.num_alive, seen.kv_cache_usage) == (0, 0.0)


def test_a_prefix_hit_is_counted_and_computes_less():
    machine = Machine(make_config())
    prompt = list(range(1, 14))
    for name in "ab":
        machine.add(make_request(name, prompt=prompt, max_tokens=2))
        machine.run()
    assert machine.engine.snapshot().cached_prompt_tokens == 12
    assert machine.tokens("a") == machine.tokens("b")


def test_why_a_step_failed_is_said_even_where_no_row_fails_alone(caplog):
    """Memory may run out for eight rows and not for one: then every step is computed row by row."""
    machine = Machine(make_config())
    machine.add(make_request("a"), make_request("b"))

    def fail_together(batch):
        if batch.num_rows > 1:
            raise ValueError("no room for so many rows")

    machine.runner._before_run = fail_together
    machine.run()
    assert machine.engine.snapshot().failed_steps > 1
    # Once, and not with every step.
    assert caplog.text.count("no room for so many rows") == 1
