"""Tenants take turns in the workers as in the queue."""

import pytest

from quire.queue.rank.fairness import Fairness
from tests.service.builders import Queue, StepGate, WorkerThread, eventually

NUM_LARGE, NUM_SMALL = 16, 4


def order_of_starts(queue: Queue, names: dict[str, str], *, first_of_equals: str) -> str:
    """The tenants in the order in which their requests had their first token, in milliseconds."""
    first = {
        name: int(queue.connection.hget(queue.keys.request(name), "first_token_ms"))
        for name in names
    }
    tenants = sorted(names, key=lambda name: (first[name], names[name] != first_of_equals))
    return "".join(names[name] for name in tenants)


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_worker_starts_requests_in_the_order_in_which_tenants_take_turns(
    queue: Queue, by_tokens: bool
):
    """Its engine orders the requests of its line by their moments, not by their arrivals."""
    queue.broker.set_fairness(Fairness(by_tokens=by_tokens))
    names = {queue.submit(max_tokens=8, tenant="a"): "a" for _ in range(NUM_LARGE)}
    names |= {queue.submit(max_tokens=8, tenant="b"): "b" for _ in range(NUM_SMALL)}
    gate = StepGate(steps=0)
    settings = queue.settings(policy="fcfs", max_num_seqs=1, claim_batch=NUM_LARGE + NUM_SMALL)
    with WorkerThread(settings, before_run=gate):
        # All are in its line before it computes anything.
        eventually(lambda: sum(queue.broker.queue_depth().values()) == 0, "all are claimed")
        gate.open()
        for name in names:
            queue.result(name)
    order = order_of_starts(queue, names, first_of_equals="b" if by_tokens else "a")
    if by_tokens:
        # The first one of a started before those of b were looked at.
        assert order[: 2 * NUM_SMALL].count("b") == NUM_SMALL
    else:
        assert order == "a" * NUM_LARGE + "b" * NUM_SMALL
