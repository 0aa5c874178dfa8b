"""The laws of fairness in every state within bounds, and the rules that break them."""

import pytest

from tests.simulation.fairness.search import CONTROLS, SCENARIOS, explore


@pytest.mark.parametrize("bounds", SCENARIOS, ids=lambda bounds: bounds.name)
def test_no_law_of_fairness_is_broken_in_any_state(bounds):
    found = explore(bounds)
    print(f"{bounds.name}: {found.num_positions} states")
    assert not found.broken, (found.broken, found.way)
    assert found.num_positions > 1000


@pytest.mark.parametrize(("kind", "bounds", "law"), CONTROLS, ids=str)
def test_a_doctored_rule_breaks_its_law(kind, bounds, law):
    found = explore(bounds, kind)
    assert found.broken.startswith(law), (found.broken, found.way)
