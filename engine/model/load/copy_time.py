"""Measures how long a block or a state takes to the host and back. Decides nothing."""

import statistics
from collections.abc import Callable

import torch

from engine.batch import BlockCopy, StateCopy
from engine.model.device.kv_pool import KVPool
from engine.model.device.state_pool import StatePool

#: Blocks per measured copy: those of a request of medium length.
NUM_MEASURED_BLOCKS = 16
#: Measured copies, after one that is not counted: it maps the memory.
NUM_ROUNDS = 3


def block_copy_seconds(
    kv_pool: KVPool, device: torch.device, now: Callable[[], float] | None
) -> float:
    """Median seconds to copy one block out and in again; 0.0 without host blocks or a clock.

    Call it before a request has blocks: it writes to the first ones what they have.
    """
    count = min(NUM_MEASURED_BLOCKS, kv_pool.num_blocks, kv_pool.num_host_blocks)
    if not count or now is None:
        return 0.0
    copies = [BlockCopy(block_id, block_id) for block_id in range(count)]

    def round_trip() -> None:
        kv_pool.swap_out(copies)
        kv_pool.swap_in(copies)

    return _median_seconds(round_trip, device, now) / count


def state_copy_seconds(
    states: StatePool, device: torch.device, now: Callable[[], float] | None
) -> float:
    """The same for one recurrent state."""
    if not states.num_host_slots or now is None:
        return 0.0
    states.fill([0], 1, 0.0)
    copies = [StateCopy(0, 0, 1)]

    def round_trip() -> None:
        states.swap_out(copies)
        states.swap_in(copies)

    return _median_seconds(round_trip, device, now)


def _median_seconds(
    round_trip: Callable[[], None], device: torch.device, now: Callable[[], float]
) -> float:
    seconds = []
    for _ in range(1 + NUM_ROUNDS):
        began = now()
        round_trip()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(now() - began)
    return statistics.median(seconds[1:])
