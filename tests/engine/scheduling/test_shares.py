"""Shares of the classes: a minimum for each that has work, and the rest for whoever comes first."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Priority, Request, RequestState
from engine.scheduling.shares import minimums
from tests.engine.builders import Machine, make_config, make_request
from tests.engine.scheduling.test_step_mix import rows, steps

LOW, NORMAL, HIGH, CRITICAL = Priority
#: Those of the reference system.
SHARES = (0.05, 0.3, 0.4, 0.25)
#: Longer than any test, so that no request gains a class by waiting.
NEVER = 1e9


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ((), 64, []),
        (SHARES, 100, [5, 30, 40, 25]),
        (SHARES, 64, [3, 19, 26, 16]),
        (SHARES, 16, [1, 5, 6, 4]),
        # One for each class, before any class gets what it has a right to.
        (SHARES, 4, [1, 1, 1, 1]),
        (SHARES, 1, [0, 0, 1, 0]),
        ((0.07, 0.0, 0.0, 0.0), 100, [7, 0, 0, 0]),
        ((0.01, 0.0, 0.0, 0.0), 64, [1, 0, 0, 0]),
    ],
)
def test_the_minimum_of_each_class(shares, total, expected):
    assert list(minimums(shares, total).values()) == expected


@given(shares=st.lists(st.integers(0, 25), min_size=4, max_size=4), total=st.integers(1, 600))
def test_minimums_never_add_up_to_more_than_there_is_and_none_is_left_out(shares, total):
    parts = minimums([share / 100 for share in shares], total)
    assert sum(parts.values()) <= total
    if total >= 4:
        assert [part > 0 for part in parts.values()] == [share > 0 for share in shares]


def sharing(**overrides) -> Machine:
    fields = {
        "num_blocks": 400, "max_num_batched_tokens": 10, "aging_seconds": NEVER,
        "class_shares": (0.2, 0.0, 0.0, 0.5), "enable_prefix_caching": False,
    }  # fmt: skip
    return Machine(make_config(**(fields | overrides)))


def add_two(machine: Machine) -> Machine:
    machine.add(
        make_request("low", prompt=20, max_tokens=9, priority=LOW),
        make_request("high", prompt=30, max_tokens=9, priority=CRITICAL),
    )
    return machine


def test_a_class_gets_its_minimum_beside_a_better_one_that_could_take_all():
    machine = add_two(sharing())
    assert steps(machine, 4) == ["high:8 low:2", "high:8 low:2", "high:8 low:2", "high:6 low:4"]


def test_without_shares_the_better_class_takes_all_and_leaves_one_token():
    machine = add_two(sharing(class_shares=()))
    assert steps(machine, 4) == ["high:10", "high:10", "high:10", "high:1 low:9"]


def test_what_a_class_does_not_use_goes_to_the_others():
    machine = sharing()
    machine.add(make_request("low", prompt=20, max_tokens=9, priority=LOW))
    assert steps(machine, 2) == ["low:10", "low:10"]


def test_decodes_count_for_the_share_of_their_class():
    machine = sharing(class_shares=(0.2, 0.0, 0.0, 0.0))
    machine.add(*(make_request(name, prompt=1, max_tokens=40, priority=LOW) for name in "ab"))
    machine.step()
    machine.add(
        make_request("c", prompt=20, max_tokens=9, priority=LOW),
        make_request("high", prompt=20, max_tokens=9, priority=CRITICAL),
    )
    # The decodes of a and b are the two tokens of the class, so c waits for the better one.
    assert steps(machine, 3) == ["a:1 b:1 high:8", "a:1 b:1 high:8", "a:1 b:1 high:4 c:4"]


def test_a_free_slot_goes_to_the_class_that_lacks_one():
    machine = sharing(max_num_seqs=2, class_shares=(0.5, 0.0, 0.0, 0.5))
    machine.add(*(make_request(f"h{n}", prompt=2, max_tokens=3, priority=CRITICAL) for n in "abc"))
    machine.add(make_request("low", prompt=2, max_tokens=3, priority=LOW))
    assert steps(machine, 2) == ["ha:2 low:2", "ha:1 low:1"]


def test_a_better_class_takes_no_slot_of_the_minimum_of_another():
    machine = sharing(max_num_seqs=3, class_shares=(0.3, 0.0, 0.0, 0.3))
    machine.add(*(make_request(f"l{n}", prompt=2, max_tokens=30, priority=LOW) for n in range(3)))
    machine.step()
    machine.add(*(make_request(f"h{n}", prompt=2, max_tokens=9, priority=CRITICAL) for n in "abc"))
    machine.step()
    running = Counter(request.priority for request in running_of(machine).values())
    # An urgent request still starts in the next step, until its victims are at their minimum.
    assert running == {LOW: 1, CRITICAL: 2}
    machine.step()
    assert "l0:1" in rows(machine)


def running_of(machine: Machine) -> dict[str, Request]:
    return machine.engine._scheduler.running.requests


@dataclass
class Rush:
    """A line of each class that never ends: each request that ends is followed by another."""

    machine: Machine
    lengths: tuple[int, int] = (30, 12)
    num_in_line: int = 8
    tokens: Counter = field(default_factory=Counter)
    number: int = 0

    def step(self) -> None:
        waiting = Counter(
            one.priority for one in self.machine.engine._scheduler.requests.values()
            if one.state is not RequestState.RUNNING
        )  # fmt: skip
        for level in Priority:
            for _ in range(self.num_in_line - waiting[level]):
                self.number += 1
                prompt, output = self.lengths
                request = make_request(
                    f"{level.name}{self.number}", prompt=prompt, max_tokens=output,
                    priority=level, arrival=self.machine.now,
                )  # fmt: skip
                self.machine.add(request)
        self.machine.step()
        batch = self.machine.batches.pop()
        for row, request in zip(batch.rows, batch.requests, strict=True):
            self.tokens[request.priority] += len(row.token_ids)


def shares_of_a_rush(class_shares, *, num_steps: int, **overrides) -> list[float]:
    config = {"max_num_seqs": 20, "max_num_batched_tokens": 60, "num_blocks": 600} | overrides
    rush = Rush(sharing(class_shares=class_shares, **config))
    for _ in range(num_steps):
        rush.step()
    total = sum(rush.tokens.values())
    return [rush.tokens[level] / total for level in Priority]


@pytest.mark.parametrize("lengths", [(30, 12), (4, 60), (90, 2)])
def test_over_a_long_rush_of_all_classes_each_gets_its_share(lengths):
    rush = Rush(
        sharing(class_shares=SHARES, max_num_seqs=20, max_num_batched_tokens=60, num_blocks=600),
        lengths=lengths,
    )
    for _ in range(500):
        rush.step()
    assert rush.machine.engine.violations() == []
    total = sum(rush.tokens.values())
    found = [rush.tokens[level] / total for level in Priority]
    for mine, least in zip(found, SHARES, strict=True):
        # What a class lacks is made up for later.
        assert mine >= 0.95 * least, found


def test_without_shares_the_same_rush_leaves_the_lower_classes_nothing():
    found = shares_of_a_rush((), num_steps=300)
    assert found[CRITICAL] > 0.99 and found[LOW] == found[NORMAL] == 0


def test_shares_cost_no_step_where_classes_do_not_compete():
    machines = [sharing(class_shares=shares) for shares in ((), SHARES)]
    for machine in machines:
        machine.add(*(make_request(f"r{n}", prompt=9, max_tokens=9) for n in range(30)))
        machine.run()
    assert len(machines[0].batches) == len(machines[1].batches)
    assert [len(batch.rows) for batch in machines[0].batches] == [
        len(batch.rows) for batch in machines[1].batches
    ]


SLOTS = 6
#: Four tokens for each slot, so that single tokens of running requests leave room for shares.
BUDGET = 4 * SLOTS

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(Priority), st.integers(1, 90), st.integers(1, 9)
    ),
    min_size=1,
    max_size=16,
)  # fmt: skip


def in_steps(machine: Machine, plan):
    """Plays a plan to its end, and yields after each step the ids that ran before it."""
    for number, (gap, priority, prompt, max_tokens) in enumerate(plan):
        for _ in range(gap):
            if machine.engine.has_work():
                before = set(running_of(machine))
                machine.step()
                yield before
        request = make_request(
            f"r{number}", prompt=prompt, max_tokens=max_tokens, priority=priority,
            arrival=machine.now,
        )  # fmt: skip
        machine.add(request)
    while machine.engine.has_work():
        assert machine.now < 3000, "livelock"
        before = set(running_of(machine))
        machine.step()
        yield before


def judged(
    machine: Machine, before: set[str], least: dict[Priority, int], slots: dict[Priority, int]
) -> None:
    """What must hold of the last step, with more blocks than all requests need."""
    batch = machine.batches[-1]
    requests = machine.engine._scheduler.requests.values()
    got, wanted, due = Counter(), Counter(), Counter()
    for row, request in zip(batch.rows, batch.requests, strict=True):
        got[request.priority] += len(row.token_ids)
        pending = len(row.token_ids) if row.samples else request.num_tokens - row.start
        wanted[request.priority] += pending
        # One that is admitted beyond the slots of its class comes in the usual order.
        due[request.priority] += pending if row.request_id in before else 0
    assert sum(got.values()) <= BUDGET
    waiting = Counter(one.priority for one in requests if one not in batch.requests)
    # One that has just ended had its slot in this step.
    held = Counter(request.priority for request in batch.requests)
    for level in Priority:
        # A decode that gives way after the turn of its class takes its token with it.
        gone = sum(one.priority is level for one in requests if gave_way(one, machine))
        assert got[level] >= min(least[level], due[level]) - gone, (level, got, due)
        if waiting[level] and held[level] < slots[level] and got[level] < least[level]:
            assert len(batch.rows) == SLOTS
    if sum(got.values()) < BUDGET:
        # Nothing that could have been computed was left for the next step.
        assert got == wanted
        assert not waiting or len(batch.rows) == SLOTS


def gave_way(request: Request, machine: Machine) -> bool:
    """Whether it was preempted in the last step; each takes a unit of the machine's time."""
    preempted_at = request.times.preempted_at
    return preempted_at is not None and preempted_at >= machine.now - 1


@settings(max_examples=100, deadline=None)
@given(
    shares=st.lists(st.integers(0, 16), min_size=4, max_size=4),
    plan=arrivals,
    policy=st.sampled_from(["priority", "fcfs", "sjf", "adaptive"]),
)
def test_in_every_step_each_class_gets_its_minimum_and_nothing_is_left_unused(shares, plan, policy):
    config = make_config(
        num_blocks=500, max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET, policy=policy,
        enable_prefix_caching=False, class_shares=tuple(share / 100 for share in shares),
    )  # fmt: skip
    machine = Machine(config)
    least, slots = (minimums(config.class_shares, total) for total in (BUDGET, SLOTS))
    for before in in_steps(machine, plan):
        judged(machine, before, least, slots)


@settings(max_examples=50, deadline=None)
@given(shares=st.lists(st.integers(0, 25), min_size=4, max_size=4), plan=arrivals)
def test_no_better_class_takes_a_slot_of_a_minimum(shares, plan):
    config = make_config(
        num_blocks=500, max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET,
        class_shares=tuple(share / 100 for share in shares),
    )  # fmt: skip
    machine = Machine(config)
    slots = minimums(config.class_shares, SLOTS)
    held, preempted = Counter(), set()
    for _ in in_steps(machine, plan):
        requests = machine.engine._scheduler.requests.values()
        now = {one.request_id for one in requests if one.state is RequestState.PREEMPTED}
        for request in requests:
            if request.request_id in now - preempted:
                held[request.priority] -= 1
                assert held[request.priority] >= slots[request.priority]
        preempted = now
        held = Counter(request.priority for request in running_of(machine).values())
