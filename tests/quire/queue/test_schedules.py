"""The laws of the protocol under random schedules, on a real server; see schedules.py.

A failing seed is replayed with `pytest tests/quire/queue/test_schedules.py -k "seed17 and
divergent"`. QUIRE_SCHEDULES sets how many seeds are tried.
"""

import os

import pytest

from quire.queue.broker import Broker
from quire.queue.scripts import load_source
from tests.quire.builders import submit_and_claim
from tests.quire.conftest import queue_of_its_own
from tests.quire.schedules import MAX_ATTEMPTS, World

#: Seeds per mode.
NUM_SEEDS = int(os.environ.get("QUIRE_SCHEDULES", "10"))

#: A negative control has this many seeds to break the laws under this many of them.
NUM_CONTROL_SEEDS = 60
MIN_CONTROL_FAULTS = 2

_FENCE = "return fields.state == 'running' and fields.epoch == epoch and fields.owner == owner"

pytestmark = [pytest.mark.real_redis]


def run(connection, *, seed: int, mode: str, fence: str = _FENCE) -> tuple[World, list[str]]:
    with queue_of_its_own(connection) as make:
        transitions = ("commit", "heartbeat", "release")
        assert all(_FENCE in load_source(name) for name in transitions)
        broker: Broker = make(
            # No lease may expire by itself, or the seed would not be all there is to a schedule.
            lease_seconds=3600,
            max_attempts=MAX_ATTEMPTS,
            sources={name: load_source(name).replace(_FENCE, fence) for name in transitions},
        )
        world = World(broker, connection, seed=seed, mode=mode)
        return world, world.run()


@pytest.mark.parametrize("mode", ["divergent", "amnesia"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS), ids=lambda seed: f"seed{seed}")
def test_the_laws_hold_under_crashes_zombies_replays_and_lost_replies(real_connection, seed, mode):
    world, broken = run(real_connection, seed=seed, mode=mode)
    assert broken == []
    assert (world.num_forgotten > 0) <= (mode == "amnesia")


def breaks_the_laws(connection, *, mode: str, fence: str, first_seed: int) -> bool:
    """Whether the laws break; the seed that is tried first saves time if it breaks them."""
    faults = 0
    for seed in range(first_seed, first_seed + NUM_CONTROL_SEEDS):
        faults += bool(run(connection, seed=seed, mode=mode, fence=fence)[1])
        if faults == MIN_CONTROL_FAULTS:
            return True
    return False


def test_without_a_fence_the_same_schedules_break_the_laws(real_connection):
    fence = "return fields.state == 'running'"
    assert breaks_the_laws(real_connection, mode="divergent", fence=fence, first_seed=12)


def test_the_epoch_alone_is_no_fence_when_the_server_forgets(real_connection):
    fence = "return fields.state == 'running' and fields.epoch == epoch"
    assert breaks_the_laws(real_connection, mode="amnesia", fence=fence, first_seed=32)


def run_with_a_claim_past_the_books(connection):
    entered = "enter(keys, id, 'running')"
    source = load_source("claim")
    assert entered in source
    source = source.replace(entered, "redis.call('HSET', keys.record, 'state', 'running')")
    with queue_of_its_own(connection) as make:
        broker = make(lease_seconds=3600, sources={"claim": source})
        broken = World(broker, connection, seed=1, mode="divergent").run()
        assert any(fault.startswith("I10") for fault in broken)
        submit_and_claim(broker, id="last")


def test_a_transition_that_changes_a_state_without_the_books_is_noticed(real_connection):
    with pytest.raises(AssertionError, match="the books are wrong"):
        run_with_a_claim_past_the_books(real_connection)
