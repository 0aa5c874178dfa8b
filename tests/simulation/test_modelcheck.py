"""The model check in small: laws hold, controls are caught, and reductions lose nothing.

The whole of it is `python -m tests.simulation.modelcheck`.
"""

import json
from collections import deque
from functools import cache

import pytest

from tests.simulation import modelcheck
from tests.simulation.canonical import Reductions, canonical
from tests.simulation.controls import CONTROLS, Control, NoFence, RefusedAndKept
from tests.simulation.exploration import Search, explore, no_collection
from tests.simulation.processes import Processes
from tests.simulation.protocol_model import Scripts
from tests.simulation.world import Scenario, World, scripts_of

#: Scenarios small enough to be explored without any reduction.
TINY_SCENARIOS = (
    Scenario("tiny", num_tokens=1, max_attempts=1, may_cancel=True),
    Scenario("tiny, released", num_tokens=1, max_attempts=1, num_releases=1),
    Scenario("tiny, expiry", num_tokens=0, max_attempts=1, num_expiries=1),
    Scenario("tiny, a rollback", num_tokens=0, max_attempts=1, num_rollbacks=1),
)

explored = cache(explore)


@pytest.mark.parametrize("scenario", modelcheck.SMALL_SCENARIOS, ids=lambda s: s.name)
def test_no_law_is_broken_in_any_state_of_a_small_scenario(scenario):
    result = explored(scenario)
    print(modelcheck.summary(result))
    assert result.violation is None, str(result.violation)


def test_small_scenarios_meet_every_answer_of_every_script():
    results = [explored(scenario) for scenario in modelcheck.SMALL_SCENARIOS]
    assert modelcheck.never_met(results) == []


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_what_is_broken_on_purpose_is_caught_by_its_law_and_the_way_can_be_walked_again(control):
    violation = explored(control.scenario, control.kind).violation
    assert violation is not None
    assert violation.broken[0].startswith(control.law)
    processes = Processes(control.scenario, scripts_of(control.scenario, control.kind))
    world = World.initial(control.scenario)
    for step in violation.trace:
        assert step in list(processes.steps(world))
        world = step.world


@pytest.mark.parametrize("scenario", TINY_SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_reductions_lose_no_state_and_invent_none(scenario):
    """Without them the search finds the same representatives, though it visits many more worlds."""
    search = Search(scenario, Scripts)
    assert search.run() is None
    processes = Processes(scenario, scripts_of(scenario))
    first = World.initial(scenario)
    seen, waiting = {first}, deque([first])
    with no_collection():
        while waiting:
            for step in processes.steps(waiting.popleft()):
                if step.world not in seen:
                    seen.add(step.world)
                    waiting.append(step.world)
    assert len(seen) > len(search.numbers)
    found = search.numbers.keys()
    lost = {canonical(world, Reductions()) for world in seen} ^ found
    # A forgotten claim cannot be released any more, which would only waste the release.
    assert all(with_one_more_release(world) in found and world not in found for world in lost)


def with_one_more_release(world):
    return world._replace(left=world.left._replace(releases=world.left.releases + 1))


def run_main(monkeypatch, tmp_path, **tables) -> tuple[int, dict]:
    figures = tmp_path / "figures.json"
    monkeypatch.setenv(modelcheck.JSON_VARIABLE, str(figures))
    for name, table in tables.items():
        monkeypatch.setattr(modelcheck, name, table)
    status = modelcheck.main([])
    return status, json.loads(figures.read_text())


def test_the_program_writes_its_figures_and_succeeds(monkeypatch, tmp_path, capsys):
    scenarios = modelcheck.SMALL_SCENARIOS[-1:]
    status, figures = run_main(
        monkeypatch, tmp_path, SCENARIOS=scenarios, CONTROLS=CONTROLS[:1], OUTCOMES=frozenset()
    )
    assert status == 0
    assert figures["states"] == explored(scenarios[0]).num_states
    assert (figures["violations"], figures["controls"], figures["controls_caught"]) == (0, 1, 1)
    assert "caught by I4" in capsys.readouterr().out


def test_the_program_fails_when_a_law_breaks_and_prints_the_way_there(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(modelcheck, "explore", lambda scenario, _: explore(scenario, NoFence))
    status, figures = run_main(
        monkeypatch, tmp_path, SCENARIOS=[Scenario("s")], CONTROLS=(), OUTCOMES=frozenset()
    )
    assert (status, figures["violations"]) == (1, 1)
    assert "1 client     submit(request=0)" in capsys.readouterr().out


def test_the_program_fails_when_a_control_is_not_caught(monkeypatch, tmp_path):
    harmless = Control(Scenario("nothing is wrong here", num_tokens=1), "I1")
    by_another_law = Control(Scenario("refused", num_expiries=1), "I1", RefusedAndKept)
    for control in (harmless, by_another_law):
        status, figures = run_main(
            monkeypatch, tmp_path, SCENARIOS=(), CONTROLS=(control,), OUTCOMES=frozenset()
        )
        assert (status, figures["controls_caught"]) == (1, 0)


def test_the_program_fails_when_an_answer_is_never_met(monkeypatch, tmp_path):
    status, _ = run_main(
        monkeypatch,
        tmp_path,
        SCENARIOS=[Scenario("s", num_tokens=1)],
        CONTROLS=(),
        OUTCOMES=frozenset({("submit", "created"), ("commit", "rewind")}),
    )
    assert status == 1
