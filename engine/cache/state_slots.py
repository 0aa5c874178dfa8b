"""The slots of recurrent states: each running request of a model with recurrence holds one.

Knows no device, no priorities and no tensor. A slot has a fixed size, whatever the length of its
request, so it is a resource beside the blocks, with a limit of its own. A model without recurrence
has no slots, and its requests need none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.batch import StateCopy
from engine.cache.block_pool import BlockPool
from engine.request import NO_SLOT, Request


@dataclass(slots=True)
class StateMoves:
    """The copies of states that a step makes before its rows.

    First `out` to the host, then `back` from it, then `restored` from snapshots.
    """

    out: list[StateCopy] = field(default_factory=list)
    back: list[StateCopy] = field(default_factory=list)
    restored: list[StateCopy] = field(default_factory=list)


class StateSlots:
    """Gives slots to requests, on the device and for swapped ones on the host.

    A request records its own slots, so that its rows have them at hand. Only this class sets them.
    """

    def __init__(self, num_slots: int, num_host_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.host_pool = BlockPool(num_host_slots)
        self._moves = StateMoves()
        self._host_slots_in_flight: list[int] = []

    @property
    def is_needed(self) -> bool:
        """Whether the model has a recurrent state."""
        return self.pool.num_blocks > 0

    def has_room(self, *, num_gone: int) -> bool:
        """Whether a request gets a slot after `num_gone` running ones have given theirs back."""
        return not self.is_needed or self.pool.num_free + num_gone > 0

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host has room for the state, and the request's slot contains it by now."""
        if not self.is_needed:
            return True
        is_restored = all(copy.destination != request.state_slot for copy in self._moves.restored)
        return self.host_pool.num_free > 0 and is_restored

    def take(self, request: Request) -> None:
        """Give an admitted request a slot; what the slot contains is never read."""
        if self.is_needed:
            assert request.state_slot == NO_SLOT
            (request.state_slot,) = self.pool.allocate(1)

    def restore(self, request: Request, snapshot: int, num_tokens: int) -> None:
        """Copy a snapshot to the slot of a request that was just admitted, in this step."""
        self._moves.restored.append(StateCopy(snapshot, request.state_slot, num_tokens))

    def free(self, request: Request) -> None:
        """Take back the slots of a request, on device and host; it may have none."""
        if request.state_slot != NO_SLOT:
            # The next owner of the slot may get a state of its own in this step.
            self._moves.restored[:] = [
                copy for copy in self._moves.restored if copy.destination != request.state_slot
            ]
            self.pool.free([request.state_slot])
            request.state_slot = NO_SLOT
        if request.host_state_slot != NO_SLOT:
            self.host_pool.free([request.host_state_slot])
            request.host_state_slot = NO_SLOT

    def swap_out(self, request: Request) -> None:
        """Move the state after the request's computed tokens to the host, in this step."""
        if not self.is_needed:
            return
        (host_slot,) = self.host_pool.allocate(1)
        copy = StateCopy(request.state_slot, host_slot, request.num_computed_tokens)
        self._moves.out.append(copy)
        self.free(request)
        request.host_state_slot = host_slot

    def swap_in(self, request: Request) -> None:
        """Move the state of a swapped request back to the device, in this step."""
        if not self.is_needed:
            return
        host_slot, request.host_state_slot = request.host_state_slot, NO_SLOT
        self.take(request)
        copy = StateCopy(host_slot, request.state_slot, request.num_computed_tokens)
        self._moves.back.append(copy)
        # Not freed yet, for the reason that `KVCache.swap_in` gives.
        self._host_slots_in_flight.append(host_slot)

    def begin_step(self) -> StateMoves:
        """Begin to plan a step: returns its moves, to which later calls add."""
        self.host_pool.free(self._host_slots_in_flight)
        self._host_slots_in_flight = []
        self._moves = StateMoves()
        return self._moves

    def violations(self, alive: Iterable[Request]) -> list[str]:
        """The violated invariants of the slots; empty if all hold. Linear in slots and requests."""
        found = [f"states: {law}" for law in self.pool.violations()]
        found += [f"states on the host: {law}" for law in self.host_pool.violations()]
        requests = list(alive)
        held = sorted(one.state_slot for one in requests if one.state_slot != NO_SLOT)
        if held != _owned(self.pool):
            found.append("slots of states are not those of the requests alive")
        host = [one.host_state_slot for one in requests if one.host_state_slot != NO_SLOT]
        if sorted(host + self._host_slots_in_flight) != _owned(self.host_pool):
            found.append("slots of swapped states are not those of the requests alive")
        return found


def _owned(pool: BlockPool) -> list[int]:
    """The owned slots, each as often as it is owned."""
    slots = range(pool.num_blocks)
    return [slot for slot in slots for _ in range(pool.reference_count(slot))]
