"""The whole system under seeded schedules; see `python -m tests.simulation.system --help`."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import service.worker.incoming.reception
from engine.request import Request
from quire.queue.roles import WorkerSide
from quire.wire.constraints import Constraint
from quire.wire.output import TokenChunk
from quire.wire.protocol import GenerationRequest
from service.worker.constraints.matching import GrammarConstraint
from service.worker.outgoing.delivery import Delivery
from tests.simulation.system import __main__ as command
from tests.simulation.system import audit
from tests.simulation.system.__main__ import CONTROL_SEEDS, Figures, catches, play_all, replay
from tests.simulation.system.controls import CONTROLS, Control
from tests.simulation.system.plan import FAULTS
from tests.simulation.system.schedule import play
from tests.simulation.system.seams import installed

NUM_SEEDS = 70
#: The first seed that is tried for a device that takes a request along on its last attempt.
TAKEN_ALONG_SEED = 56
CHECKOUT = Path(__file__).parents[3]
#: A worker that takes over and forgets something; what, a test patches in.
FORGETFUL = Control("forgetful", "I1", plague="kill a worker")
#: A control that nearly every schedule catches.
QUICK = tuple(control for control in CONTROLS if control.law == "I10")

#: Kinds of events that the schedules must have seen, or they have become too tame.
EXPECTED = {
    *FAULTS,
    *("caller killed", "request_lost", "reply_lost", "arrives_late", "rollbacks"),
    *("commit ok", "commit fenced", "commit rewind", "commit replayed", "tokens"),
    *("request resumed", "request released", "leases reaped", "claim lost", "requests promoted"),
    *("worker died", "worker ended", "draining", "redis unavailable", "not claimed"),
    *("claimed by a moment", "later turns", "kept for a worker"),
}


@pytest.fixture(scope="module")
def figures() -> Figures:
    played = Figures()
    played.add(play_all(range(NUM_SEEDS)))
    return played


def test_every_output_is_that_of_the_undisturbed_run_and_every_law_holds(figures):
    assert figures.failing == []
    assert figures.runs == NUM_SEEDS


def test_everything_that_may_befall_a_schedule_has_befallen_one(figures):
    assert {name for name in EXPECTED if not figures.counts[name]} == set()


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_broken_system_is_caught(control):
    assert catches(control, enough=1) > 0


def test_a_control_that_would_change_nothing_is_refused():
    with pytest.raises(AssertionError, match="no script has"):
        catches(Control("nothing", "I1", {"this stands nowhere": ""}))


def test_a_schedule_is_a_pure_function_of_its_seed():
    with installed():
        first, second = (play(7, keeps_trace=True).trace for _ in range(2))
    assert len(first) > 50
    assert first == second


def test_a_replay_tells_what_happened_and_in_another_process_the_same_to_the_letter(capsys):
    assert replay(3) == 0
    told = capsys.readouterr().out
    assert "worker ready" in told
    assert told.endswith("seed 3: all laws held\n")
    # No order of a set decides anything: hashes differ from one process to the next.
    program = [sys.executable, "-m", "tests.simulation.system", "--seed", "3"]
    again = subprocess.run(program, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert again.stdout == told


def run_command(monkeypatch, tmp_path, *arguments: str, **replaced: object) -> tuple[int, dict]:
    """Runs the command with parts of it replaced; returns its exit code and its figures."""
    file = tmp_path / "figures.json"
    monkeypatch.setenv("SIM_JSON", str(file))
    for name, part in replaced.items():
        monkeypatch.setattr(command, name, part)
    code = command.main([*arguments, "--jobs", "1", "--catches", "1"])
    return code, json.loads(file.read_text())


def test_the_command_writes_its_figures_and_succeeds(monkeypatch, tmp_path):
    code, told = run_command(monkeypatch, tmp_path, "--runs", "4", CONTROLS=QUICK)
    assert (code, told["runs"], told["violations"]) == (0, 4, 0)
    assert (told["controls"], told["controls_caught"]) == (1, 1)
    assert told["tokens"] > 0


def test_the_command_fails_when_a_control_is_not_caught(monkeypatch, tmp_path):
    by_another_law = tuple(replace(control, law="I9") for control in QUICK)
    replaced = {"CONTROLS": by_another_law, "CONTROL_SEEDS": 3}
    code, told = run_command(monkeypatch, tmp_path, "--runs", "1", **replaced)
    assert (code, told["violations"], told["controls_caught"]) == (1, 0, 0)


def test_the_command_fails_when_a_law_is_broken_and_says_what_replays_it(
    monkeypatch, tmp_path, capsys
):
    broken = partial(play, sabotage=QUICK[0].sabotage)
    replaced = {"CONTROLS": (), "play": broken}
    code, told = run_command(monkeypatch, tmp_path, "--runs", "1", **replaced)
    assert (code, told["violations"] > 0) == (1, True)
    said = capsys.readouterr().out
    assert (
        "seed 0 breaks the laws; replay it with `python -m tests.simulation.system --seed 0`"
        in said
    )
    assert "I10" in said


def test_a_worker_that_takes_over_and_forgets_how_likely_the_tokens_were_is_caught(monkeypatch):
    recall = Delivery.recall

    def forgetful(delivery: Delivery, published: Sequence[TokenChunk]) -> None:
        recall(delivery, [replace(chunk, logprobs=()) for chunk in published])

    monkeypatch.setattr(Delivery, "recall", forgetful)
    assert catches(replace(FORGETFUL, first_seed=8), enough=1) > 0


def test_a_constraint_that_forgets_the_tokens_of_a_life_before_is_caught(monkeypatch):
    consume = GrammarConstraint._consume

    def forgetful(rule: GrammarConstraint, output_token_ids: Sequence[int]) -> None:
        if not hasattr(rule, "_first"):
            rule._first = len(output_token_ids)
        consume(rule, output_token_ids[rule._first :])

    monkeypatch.setattr(GrammarConstraint, "_consume", forgetful)
    assert catches(replace(FORGETFUL, first_seed=36), enough=1) > 0


def test_a_takeover_that_forgets_the_adapter_is_caught(monkeypatch):
    make = service.worker.incoming.reception.engine_request

    def forgetful(
        request: GenerationRequest, delivery: Delivery, **where: Any
    ) -> tuple[Request, Constraint | None]:
        made, wanted = make(request, delivery, **where)
        return (replace(made, adapter=None) if delivery.token_ids else made), wanted

    monkeypatch.setattr("service.worker.incoming.reception.engine_request", forgetful)
    assert catches(replace(FORGETFUL, first_seed=32), enough=1) > 0


def test_tokens_that_do_not_say_which_adapter_they_are_from_are_caught():
    """Nobody goes on with such a request."""
    says_nothing = {"if published == 0 and item.fingerprint ~= '' then": "if false then"}
    control = Control(
        "first tokens say nothing", "I5", says_nothing, plague="kill a worker", first_seed=32
    )
    assert catches(control, enough=1) > 0


def test_a_worker_that_dies_of_a_defect_is_a_finding_though_another_takes_over(monkeypatch):
    commit, calls = WorkerSide.commit, itertools.count()

    def failing_once(broker: WorkerSide, *arguments: Any, **options: Any) -> Any:
        assert next(calls) != 1, "a defect"
        return commit(broker, *arguments, **options)

    monkeypatch.setattr(WorkerSide, "commit", failing_once)
    with installed():
        (violation,) = play(3).violations
    assert re.fullmatch(r"worker-\d/publisher died of AssertionError\(.*a defect.*\)", violation)


def test_the_device_of_a_last_attempt_may_take_the_request_along(monkeypatch):
    """An audit that does not know of it finds one: any change moves it to other seeds."""
    found = partial(play, plague="fail a device")
    with installed():
        with monkeypatch.context() as ignorant:
            ignorant.setattr(audit, "GIVEN_UP", ("attempts_spent",))
            seeds = range(TAKEN_ALONG_SEED, TAKEN_ALONG_SEED + CONTROL_SEEDS)
            told = ((seed, found(seed).violations) for seed in seeds)
            seed, (violation,) = next(one for one in told if one[1])
        outcome = found(seed)
    assert re.match(r"I5: \S+ ended as failed \(engine_failed\)", violation)
    assert not outcome.violations
    assert outcome.counts["worker died"]


def test_a_device_that_takes_a_request_with_attempts_left_is_caught():
    gives_up_at_once = {"if ending == 'attempts_spent' then": "if true then"}
    control = Control(
        "given up too soon", "I7", gives_up_at_once, plague="fail a device", first_seed=1
    )
    assert catches(control, enough=1) > 0
