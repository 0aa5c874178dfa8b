"""Who comes first under each policy, and that nobody waits for ever under any of them."""

import pytest

from engine.request import Priority
from engine.scheduling.policy import POLICIES
from tests.engine.builders import Machine, make_config, make_request


def order(policy: str, *requests, **config) -> str:
    machine = Machine(make_config(policy=policy, max_num_seqs=1, **config))
    machine.add(*requests)
    machine.run()
    return " ".join(o.request_id for o in machine.outputs if o.finish_reason is not None)


def test_fcfs_ignores_class_and_size():
    large = make_request("large", prompt=20, max_tokens=3, arrival=0, priority=Priority.LOW)
    small = make_request("small", prompt=1, max_tokens=1, arrival=1, priority=Priority.CRITICAL)
    assert order("fcfs", large, small) == "large small"


def test_sjf_lets_the_small_one_overtake():
    large = make_request("large", prompt=20, max_tokens=20, arrival=0)
    small = make_request("small", prompt=1, max_tokens=1, arrival=1)
    assert order("sjf", large, small) == "small large"


def test_priority_prefers_the_class_until_age_outweighs_it():
    low = make_request("low", max_tokens=1, arrival=0, priority=Priority.LOW)
    soon = make_request("soon", max_tokens=1, arrival=29, priority=Priority.NORMAL)
    late = make_request("late", max_tokens=1, arrival=31, priority=Priority.NORMAL)
    assert order("priority", low, soon, late, aging_seconds=30.0) == "soon low late"


def test_adaptive_lets_an_urgent_deadline_overtake():
    patient = make_request("patient", max_tokens=1, arrival=0)
    urgent = make_request("urgent", max_tokens=1, arrival=1, deadline=20.0)
    assert order("adaptive", patient, urgent, aging_seconds=30.0) == "urgent patient"


def test_adaptive_weighs_class_and_size_too():
    large = make_request("large", prompt=20, max_tokens=20, arrival=0)
    small = make_request("small", prompt=1, max_tokens=1, arrival=0.5)
    high = make_request("high", prompt=20, max_tokens=20, arrival=1, priority=Priority.HIGH)
    assert order("adaptive", large, small, high) == "high small large"


@pytest.mark.parametrize("policy", list(POLICIES))
def test_under_a_steady_flow_of_better_requests_the_worst_one_still_ends(policy):
    machine = Machine(make_config(policy=policy, max_num_seqs=1, aging_seconds=10.0))
    machine.add(make_request("worst", prompt=8, max_tokens=8, priority=Priority.LOW))
    for index in range(200):
        machine.add(
            make_request(
                f"b{index}", prompt=1, max_tokens=1, arrival=machine.now, priority=Priority(3)
            )
        )
        machine.step()
        if any(o.request_id == "worst" and o.finish_reason for o in machine.outputs):
            return
    pytest.fail("starved")


def test_a_shorter_aging_lets_the_low_class_end_sooner():
    """The knob is read: see how many better requests overtake under each setting."""

    def overtaken(aging_seconds: float) -> int:
        machine = Machine(make_config(max_num_seqs=1, aging_seconds=aging_seconds))
        machine.add(make_request("low", max_tokens=1, priority=Priority.LOW, arrival=0.5))
        for index in range(100):
            machine.add(
                make_request(f"h{index}", max_tokens=1, priority=Priority.HIGH, arrival=index)
            )
        machine.run()
        return [output.request_id for output in machine.outputs].index("low")

    assert overtaken(5.0) < overtaken(20.0) < 100
