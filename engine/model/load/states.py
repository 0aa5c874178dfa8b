"""Sizes the pool of recurrent states: slots for requests, slots on the host, and snapshots."""

import logging
from dataclasses import dataclass

from engine.errors import ModelRefused
from engine.model.causal_model import state_shapes_of
from engine.model.device.memory import free_memory_bytes
from engine.model.device.state_pool import StatePool, StateShapes, bytes_of_slots, bytes_per_state
from engine.model.load.chosen import Chosen

#: The most copies of one layer's states of all running requests that are alive at once.
LIVE_STATES = 4
#: The most of the free memory that snapshots take by default, behind the slots of requests
#: and a KV pool whose size is set.
SNAPSHOT_MEMORY_SHARE = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What the states of a model take.

    Args:
        shapes: as in `StatePool`; empty for a model without a recurrent state.
        num_slots: the most requests that run.
        num_snapshots: 0 for no prefix cache.
    """

    shapes: tuple[StateShapes, ...]
    num_slots: int
    num_snapshots: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device, with the states that a layer reads in a step."""
        largest = max((bytes_per_state([one]) for one in self.shapes), default=0)
        slots = bytes_of_slots(self.shapes, self.num_slots, num_snapshots=self.num_snapshots)
        return slots + LIVE_STATES * self.num_slots * largest

    def pool(self, chosen: Chosen, *, has_host_slots: bool) -> StatePool | None:
        """Allocate it, with as many slots for swapped requests; None without a state.

        Its memory is not part of `kv_cache_memory_bytes`.
        """
        if not self.shapes:
            return None
        num_host_slots = self.num_slots if has_host_slots else 0
        logger.info(
            "the recurrent state of a request takes %d bytes, in two buffers; %d slots, "
            "%d on the host; %d snapshots",
            *(bytes_per_state(self.shapes), self.num_slots, num_host_slots, self.num_snapshots),
        )
        return StatePool(
            self.shapes,
            num_slots=self.num_slots,
            num_host_slots=num_host_slots,
            num_snapshots=self.num_snapshots,
            device=chosen.device,
        )


def state_sizes(
    chosen: Chosen, *, num_slots: int, num_snapshots: int | None, kv_bytes: int
) -> StateSizes:
    """The sizes for a model.

    By default there are as many snapshots as slots, in a share of the memory behind the slots
    and the `kv_bytes` of a KV pool whose size is set.
    """
    shapes = tuple(state_shapes_of(chosen.model))
    without = StateSizes(shapes, num_slots, 0)
    if not shapes or num_snapshots is not None:
        return StateSizes(shapes, num_slots, num_snapshots or 0 if shapes else 0)
    try:
        free = free_memory_bytes(chosen.device) - without.nbytes - kv_bytes
    except ModelRefused:
        return without
    # A convolution of one tap keeps nothing.
    size = max(1, bytes_per_state(shapes))
    fitting = int(max(0, free) * SNAPSHOT_MEMORY_SHARE) // size
    return StateSizes(shapes, num_slots, min(num_slots, fitting))
