"""The recurrent states of all slots, on the device and in a bounded pool on the host.

It has only the tensors; `engine.cache.state_slots` knows the owners of slots, and
`engine.cache.state_tags` which buffer of a slot a step reads.
"""

import math
from collections.abc import Sequence

import torch

from engine.batch import StateCopy
from engine.cache.state_tags import Copied, IntArray, StateTags, Turn
from engine.model.device.copy_lane import CopyLane, CudaLane, SameLane

#: The shapes of what one layer keeps of a request, without a dimension for requests: for instance
#: the last inputs of a convolution, and a matrix.
StateShapes = Sequence[tuple[int, ...]]


class StatePool:
    """A tensor [buffers, *shape] in float32 for each part of each layer's state.

    Args:
        shapes: one entry per layer with a state, in the order the model calls them.
        num_slots: slots on `device`, of two buffers each: see `engine.cache.state_tags`.
        num_host_slots: slots on the host, of one buffer each.
        num_snapshots: snapshots on `device`, of one buffer each.
        lane: orders copies against computations; the default depends on the device.
    """

    def __init__(
        self,
        shapes: Sequence[StateShapes],
        *,
        num_slots: int,
        num_host_slots: int = 0,
        num_snapshots: int = 0,
        device: torch.device | str = "cpu",
        lane: CopyLane | None = None,
    ) -> None:
        assert num_slots >= 1 and num_host_slots >= 0
        target = torch.device(device)
        on_cuda = target.type == "cuda"
        self._lane = lane or (CudaLane() if on_cuda else SameLane())
        self.tags = StateTags(num_slots, num_snapshots)
        self.num_slots, self.num_host_slots = num_slots, num_host_slots
        self.num_snapshots = num_snapshots
        self._layers = [
            [torch.zeros((self.tags.num_buffers, *shape), device=target) for shape in parts]
            for parts in shapes
        ]
        # Pinned, because only copies from and to pinned memory are asynchronous.
        pinned = on_cuda and num_host_slots > 0
        self._host = [
            torch.zeros((num_host_slots, *part.shape[1:]), pin_memory=pinned)
            for part in self._parts
        ]

    def layer(self, index: int) -> Sequence[torch.Tensor]:
        """The parts of one layer's states, [buffers, *shape] each."""
        return self._layers[index]

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state, all layers."""
        return self.nbytes // self.tags.num_buffers

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self._parts)

    def turn(self, slots: IntArray, starts: IntArray, ends: IntArray) -> Turn:
        """See `StateTags.turn`."""
        return self.tags.turn(slots, starts, ends)

    def commit(self, turn: Turn) -> None:
        """See `StateTags.commit`; call it when the step is computed, or queued on the device."""
        self.tags.commit(turn)

    def fill(self, slots: Sequence[int], num_tokens: int, value: float) -> None:
        """Give slots a state after `num_tokens` tokens, made of one value; for checks."""
        for slot in slots:
            buffer = self.tags.put(slot, num_tokens)
            for part in self._parts:
                part[buffer].fill_(value)

    def poison(self) -> None:
        """Fill all buffers of slots and snapshots with NaN: reading what nobody wrote shows."""
        for part in self._parts:
            part[: self.tags.zero].fill_(torch.nan)
            part[self.tags.first_snapshot :].fill_(torch.nan)

    def swap_out(self, copies: Sequence[StateCopy]) -> None:
        """Device to host, bit for bit. Raises DeviceFailed if a slot has another state."""
        if not copies:
            return
        with self._lane.copying():
            for source, destination, num_tokens in copies:
                buffer = self.tags.buffer_after(source, num_tokens)
                for part, host in zip(self._parts, self._host, strict=True):
                    host[destination].copy_(part[buffer], non_blocking=True)

    def swap_in(self, copies: Sequence[StateCopy]) -> None:
        """Host to device, bit for bit."""
        if not copies:
            return
        with self._lane.copying():
            for source, destination, num_tokens in copies:
                buffer = self.tags.put(destination, num_tokens)
                for part, host in zip(self._parts, self._host, strict=True):
                    part[buffer].copy_(host[source], non_blocking=True)

    def restore(self, copies: Sequence[StateCopy]) -> None:
        """Snapshots to slots, bit for bit. Raises DeviceFailed if a snapshot is another state."""
        self._copy([self.tags.restore(*copy) for copy in copies])

    def keep(self, copies: Sequence[StateCopy]) -> None:
        """Slots to snapshots, bit for bit. Raises DeviceFailed if a slot has another state."""
        self._copy([self.tags.keep(*copy) for copy in copies])

    def _copy(self, copies: Sequence[Copied]) -> None:
        """From buffer to buffer, in order with the computations."""
        for source, destination in copies:
            for part in self._parts:
                part[destination].copy_(part[source])

    @property
    def _parts(self) -> list[torch.Tensor]:
        return [part for parts in self._layers for part in parts]


def bytes_per_state(shapes: Sequence[StateShapes]) -> int:
    """Bytes of one state, all layers: what a swap copies."""
    numbers = sum(math.prod(shape) for parts in shapes for shape in parts)
    return numbers * torch.float32.itemsize


def bytes_of_slots(shapes: Sequence[StateShapes], num_slots: int, *, num_snapshots: int = 0) -> int:
    """Bytes of a pool with so many slots on the device; 0 for a model without a state."""
    return StateTags(num_slots, num_snapshots).num_buffers * bytes_per_state(shapes)
