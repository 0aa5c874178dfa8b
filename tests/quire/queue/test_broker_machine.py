"""Any sequence of transitions keeps what a plain model promises; see broker_machine.py.

On the in-memory fake and on a real server.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from quire.queue.scripts import load_source
from tests.quire.broker_machine import BrokerMachine

#: Sequences of so many steps, and how many of them.
NUM_STEPS, NUM_SEQUENCES = 30, 25

#: A broken broker must be caught in so many.
NUM_CONTROL_SEQUENCES = 300

FENCE = "return fields.state == 'running' and fields.epoch == epoch and fields.owner == owner"


@pytest.mark.timeout(300)
def test_any_sequence_of_transitions_keeps_what_the_model_promises(connection):
    run_state_machine_as_test(
        lambda: BrokerMachine(connection),
        settings=settings(
            max_examples=NUM_SEQUENCES,
            stateful_step_count=NUM_STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_commit_without_a_fence_is_noticed(real_connection):
    source = load_source("commit")
    assert FENCE in source
    broken = source.replace(FENCE, "return fields.state == 'running'")
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            lambda: BrokerMachine(real_connection, sources={"commit": broken}),
            # The first contradiction is enough; nobody needs a small one.
            settings=settings(
                max_examples=NUM_CONTROL_SEQUENCES,
                derandomize=True,
                stateful_step_count=NUM_STEPS,
                phases=[Phase.generate],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
