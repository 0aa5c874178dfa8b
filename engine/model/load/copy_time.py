"""Measures how long a block takes to the host and back. Decides nothing."""

import statistics
from collections.abc import Callable

import torch

from engine.batch import BlockCopy
from engine.model.device.kv_pool import KVPool

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
    rounds = [_round_trip(kv_pool, copies, device, now) for _ in range(1 + NUM_ROUNDS)]
    return statistics.median(rounds[1:]) / count


def _round_trip(
    kv_pool: KVPool, copies: list[BlockCopy], device: torch.device, now: Callable[[], float]
) -> float:
    began = now()
    kv_pool.swap_out(copies)
    kv_pool.swap_in(copies)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now() - began
