"""What a seed says on a cluster, and what the controls of chaos on a cluster need."""

from tests.chaos.cluster.schedules import ALWAYS, CONTROLS, FAULTS, draw_control, draw_plan
from tests.chaos.cluster.worker import NEVER_ASKS, NOT_FOLLOWED
from tests.chaos.worker import DOCTORED


def test_a_seed_says_the_same_each_time_and_every_fault_is_drawn():
    plans = [draw_plan(seed) for seed in range(12)]
    assert plans[3] == draw_plan(3) != draw_plan(4)
    drawn = {fault.kind for plan in plans for fault in plan.faults}
    assert drawn == set(FAULTS)
    assert all({fault.kind for fault in plan.faults} >= set(ALWAYS) for plan in plans)


def test_no_request_of_a_plan_is_a_turn_of_a_session():
    assert not any(item.request.session_id for item in draw_plan(5).wanted)


def test_every_control_meets_its_fault_in_workers_that_are_broken():
    assert set(CONTROLS) <= {*DOCTORED, NEVER_ASKS, NOT_FOLLOWED}
    for name, fault in CONTROLS.items():
        plan = draw_control(name)
        assert plan.broken == (name,)
        assert {one.kind for one in plan.faults} == {fault}
