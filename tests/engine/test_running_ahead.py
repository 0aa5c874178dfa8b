"""Steps that are planned and launched while the one before them is in flight."""

import gc
import weakref
from typing import NamedTuple

import pytest

from engine.batch import UNKNOWN_TOKEN, LaunchedStep
from engine.engine import Engine
from engine.fake_runner import FakeRunner
from engine.request import FinishReason
from tests.engine.builders import EOS, Machine, expected_tokens, make_config, make_request


def make_machine(**config) -> Machine:
    return Machine(make_config(**config), runs_ahead=True)


class ListedText:
    """Text that is one line per token."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def append(self, token_id: int) -> bool:
        self._lines.append(f"{token_id}\n")
        return False

    def take_text(self, *, final: bool) -> str:
        text, self._lines = "".join(self._lines), []
        return text


class Noted(NamedTuple):
    """A step in flight, and what to write down when somebody waits for it."""

    step: LaunchedStep
    note: str
    entries: list[str]
    is_in_flight: bool = True

    def result(self):
        self.entries.append(self.note)
        return self.step.result()


class Diary(FakeRunner):
    """Writes down when steps are launched and when their results are asked for."""

    def __init__(self, **sizes) -> None:
        super().__init__(runs_ahead=True, **sizes)
        self.entries: list[str] = []

    def launch(self, batch, *, after=None):
        self.entries.append(f"launch {batch.step}")
        step = super().launch(batch, after=after and after.step)
        return Noted(step, f"result {batch.step}", self.entries)


def test_the_device_has_its_next_step_before_anyone_waits_for_this_one():
    runner = Diary(num_blocks=64, block_size=4)
    engine = Engine(make_config(), runner)
    engine.add_request(make_request(max_tokens=4))
    engine.step(lambda: 0.0)
    engine.step(lambda: 0.0)
    assert runner.entries == ["launch 1", "launch 2", "result 1", "launch 3", "result 2"]


def test_an_unknown_token_is_fed_on_the_device():
    machine = make_machine()
    request = make_request(prompt=3, max_tokens=3)
    machine.add(request)
    machine.run()
    fed = [(row.start, list(row.token_ids)) for batch in machine.batches for row in batch.rows]
    prompt = list(request.prompt_token_ids)
    assert fed[0] == (0, prompt)
    assert [start for start, _ in fed] == [0, 3, 4]
    assert machine.batches[1].decodes.token_ids.tolist() == [UNKNOWN_TOKEN]
    assert machine.tokens("r") == expected_tokens(request)


def test_who_ends_by_its_tokens_is_computed_once_too_often_and_nothing_of_it_is_seen():
    machine = make_machine()
    other = make_request("other", max_tokens=8)
    machine.runner.script.tokens = {"ends": {2: EOS}}
    machine.add(make_request("ends", max_tokens=8), other)
    machine.run()
    assert machine.finish_reason("ends") is FinishReason.EOS
    assert len(machine.tokens("ends")) == 3
    assert machine.tokens("other") == expected_tokens(other)
    computed = [r.request_id for batch in machine.batches for r in batch.requests]
    assert computed.count("ends") == 4


def test_who_ends_by_its_length_makes_room_for_the_next_step():
    machine = make_machine(max_num_seqs=1)
    machine.add(make_request("a", max_tokens=3), make_request("b", max_tokens=3))
    machine.run()
    computed = [[r.request_id for r in batch.requests] for batch in machine.batches]
    assert computed == [["a"]] * 3 + [["b"]] * 3


def test_a_token_in_flight_is_not_given_to_another_request_of_the_same_name():
    machine = make_machine()
    first, second = make_request(max_tokens=9), make_request(max_tokens=3, prompt=7)
    machine.add(first)
    machine.step()
    machine.engine.abort("r")
    machine.step()
    machine.add(second)
    seen = len(machine.outputs)
    machine.run()
    outputs = machine.outputs[seen:]
    assert all(output.request is second for output in outputs)
    assert [token for o in outputs for token in o.token_ids] == expected_tokens(second)


@pytest.mark.parametrize(("penalty", "num_ahead"), [(1.0, 3), (1.1, 0)])
def test_where_a_choice_depends_on_the_token_before_the_engine_waits_for_it(penalty, num_ahead):
    machine = make_machine()
    request = make_request(max_tokens=4, repetition_penalty=penalty)
    machine.add(request)
    machine.run()
    unknown = [batch for batch in machine.batches if UNKNOWN_TOKEN in batch.decodes.token_ids]
    assert len(unknown) == num_ahead
    assert machine.tokens("r") == expected_tokens(request)


def test_a_step_that_cannot_be_launched_behind_another_is_planned_again_and_costs_its_culprit():
    machine = make_machine()
    good = [make_request(f"good{index}", max_tokens=6) for index in range(3)]
    machine.add(*good, make_request("bad", max_tokens=6))
    machine.step()
    machine.runner.script.failing_request_ids = {"bad"}
    machine.run()
    assert machine.finish_reason("bad") is FinishReason.ERROR
    assert machine.engine.snapshot().failed_steps == 2
    for request in good:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_swaps_of_a_step_that_could_not_be_launched_are_not_made_again():
    machine = make_machine(num_blocks=5, num_host_blocks=5, preemption_mode="swap")
    requests = [make_request(name, prompt=7, max_tokens=6) for name in "ab"]
    machine.add(*requests)
    swapped = []

    def fail_once(batch):
        machine.batches.append(batch)
        if batch.swap_out and not swapped:
            swapped.append(batch)
            machine.runner.script.failing_request_ids = {"a", "b"}
        else:
            machine.runner.script.failing_request_ids = set()

    machine.runner._before_run = fail_once
    machine.run()
    assert swapped and swapped[0].decodes.token_ids.tolist() == [UNKNOWN_TOKEN]
    assert machine.engine.snapshot().failed_steps == 1
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_a_row_without_numbers_ends_its_request_and_no_other():
    machine = make_machine()
    other = make_request("other", max_tokens=6)
    machine.add(make_request("broken", max_tokens=6), other)
    machine.step()
    machine.runner.script.broken_request_ids = {"broken"}
    machine.run()
    assert machine.finish_reason("broken") is FinishReason.ERROR
    assert machine.tokens("other") == expected_tokens(other)
    assert machine.engine.snapshot().failed_steps == 0


def test_an_engine_that_is_idle_with_a_step_in_flight_serves_the_next_request():
    machine = make_machine()
    machine.runner.script.tokens = {"a": {1: EOS}}
    machine.add(make_request("a", max_tokens=9))
    machine.run()
    later = make_request("later", max_tokens=3)
    machine.add(later)
    machine.run()
    assert machine.tokens("later") == expected_tokens(later)
    assert machine.engine.violations() == []


def test_a_step_that_is_in_flight_for_nobody_does_not_last_until_somebody_comes():
    """Its device was done long ago, and idle."""
    engine = Engine(make_config(), FakeRunner(num_blocks=64, block_size=4, runs_ahead=True))
    ended = make_request("ended", max_tokens=9, stop_token_ids=range(1000))
    engine.add_request(ended)
    engine.step(lambda: 1.0)
    assert ended.is_finished and not engine.has_work()
    engine.add_request(make_request("later", max_tokens=9))
    readings = iter([3600.0] * 5)
    engine.step(lambda: next(readings, 3602.0))
    assert engine.snapshot().last_step.seconds == 2.0


def test_an_engine_that_is_idle_keeps_no_request():
    machine = make_machine()
    machine.runner.script.tokens = {"ended": {1: EOS}}
    ended = make_request("ended", max_tokens=9, text=ListedText())
    machine.add(ended)
    machine.run()
    text = weakref.ref(ended.text)
    machine.batches.clear()
    machine.outputs.clear()
    del ended
    gc.collect()
    assert text() is None


def test_once_the_last_request_with_a_penalty_has_ended_the_engine_waits_no_more():
    machine = make_machine()
    machine.add(make_request("penalized", max_tokens=2, presence_penalty=1.0))
    machine.run()
    machine.batches.clear()
    machine.add(make_request("plain", max_tokens=3))
    machine.run()
    assert UNKNOWN_TOKEN in machine.batches[1].decodes.token_ids


def test_a_step_that_was_launched_early_is_timed_from_the_end_of_the_one_before():
    engine = Engine(make_config(), FakeRunner(num_blocks=64, block_size=4, runs_ahead=True))
    engine.add_request(make_request(max_tokens=9))
    engine.step(lambda: 1.0)
    engine.step(lambda: 7.0)
    engine.step(lambda: 9.5)
    assert engine.snapshot().last_step.seconds == 2.5
    # The fifth step is launched at 10.0, while the fourth takes until 20.0.
    readings = iter([10.0, 10.0, 10.0])
    engine.step(lambda: next(readings, 20.0))
    first = engine.snapshot().last_step.seconds
    engine.step(lambda: 21.0)
    assert (first, engine.snapshot().last_step.seconds) == (10.5, 1.0)
