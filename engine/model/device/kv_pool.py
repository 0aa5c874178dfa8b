"""The keys and values of all blocks, on the device and in a bounded pool on the host.

Holds the tensors only; which block is whose is known to `engine.cache.block_pool`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import BlockCopy
from engine.model.device.copy_lane import CopyLane, CudaLane, SameLane

#: Alignment of blocks on a CPU; otherwise every row of a block would span two cache lines.
CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `kv_heads` keys of `key_dim` and values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """Two tensors per layer and place, [num_blocks, kv_heads, block_size, dim].

    A block is a contiguous run of every tensor, so copying one is a handful of long copies and a
    kernel that reads a key head's block reads memory in order.

    Args:
        shapes: one per layer that attends, in the order the model calls them.
        num_blocks: blocks on `device`.
        block_size: token slots per block.
        dtype: of keys and values; the model's own, so that nothing is rounded on the way.
        num_host_blocks: blocks on the host, for requests preempted by swap.
        has_spare_block: adds one block that no request gets, for padding to be written to.
        lane: orders swaps against computations; by default the one for the device.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
        has_spare_block: bool = False,
        lane: CopyLane | None = None,
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1 and num_host_blocks >= 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks

        place = torch.device(device)
        on_cuda = place.type == "cuda"
        self._lane = lane or (CudaLane() if on_cuda else SameLane())

        def tensors(count: int, place: torch.device, *, pinned: bool = False) -> list[torch.Tensor]:
            return [
                _zeros((count, shape.kv_heads, block_size, dim), dtype, place, pinned=pinned)
                for shape in shapes
                for dim in (shape.key_dim, shape.value_dim)
            ]

        self._has_spare_block = has_spare_block
        self._device_tensors = tensors(num_blocks + has_spare_block, place)
        # Only copies from and to pinned memory are asynchronous.
        pinned = on_cuda and num_host_blocks > 0
        self._host_tensors = tensors(num_host_blocks, torch.device("cpu"), pinned=pinned)

    @property
    def spare_block(self) -> int:
        """The id of the spare block, which follows those of all others."""
        assert self._has_spare_block
        return self.num_blocks

    def key_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, key_dim], the spare block included."""
        return self._device_tensors[2 * layer]

    def value_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, value_dim], likewise."""
        return self._device_tensors[2 * layer + 1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self._device_tensors)

    @property
    def host_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._host_tensors)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers, from the tensors themselves."""
        return sum(tensor[0].nbytes for tensor in self._device_tensors)

    def write(self, layer: int, *, key: torch.Tensor, value: torch.Tensor, slots: "Slots") -> None:
        """Store [tokens, kv_heads, dim] of one layer at the step's slots."""
        self.key_cache(layer)[slots.blocks, :, slots.offsets] = key
        self.value_cache(layer)[slots.blocks, :, slots.offsets] = value

    def make(self, blocks: range) -> None:
        """Touch the memory of unused blocks now, instead of when a step first writes to it.

        They are zeros before and after. On a CPU the system maps memory only as it is touched.
        """
        for tensor in self._device_tensors:
            tensor[blocks.start : blocks.stop].zero_()

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zero blocks that this step begins but does not fill.

        Attention reads whole blocks and weighs the unwritten slots with zero, so what an earlier
        owner left there must be finite: without this, one request's NaN would reach the next.
        """
        for tensor in self._device_tensors:
            tensor.index_fill_(0, block_ids, 0)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Device to host, bit for bit."""
        self._swap(self._device_tensors, self._host_tensors, copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Host to device, bit for bit."""
        self._swap(self._host_tensors, self._device_tensors, copies)

    def _swap(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        copies: Sequence[BlockCopy],
    ) -> None:
        if not copies:
            return
        with self._lane.copying():
            for source, destination in zip(sources, destinations, strict=True):
                _copy_blocks(source, destination, copies)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where each token of a step keeps its key and value: two [tokens] index tensors."""

    blocks: torch.Tensor
    offsets: torch.Tensor


def bytes_per_block(shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of such a pool; computed by a pool of one block without storage."""
    return KVPool(
        shapes, num_blocks=1, block_size=block_size, dtype=dtype, device="meta"
    ).bytes_per_block


def num_blocks_for(
    memory_bytes: int, shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype
) -> int:
    """How many blocks fit in `memory_bytes`; possibly none."""
    return max(0, memory_bytes) // bytes_per_block(shapes, block_size=block_size, dtype=dtype)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, place: torch.device, *, pinned: bool
) -> torch.Tensor:
    """Zeros, which on a CPU cost nothing until a block is first used.

    Zeros and not uninitialized memory, because an attention weight of zero times a leftover NaN is
    NaN. torch would write them, which takes seconds for a pool of many gigabytes; numpy gets zero
    pages from the system, which maps them as they are touched.
    """
    if place.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=place, pin_memory=pinned)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(memory)[start : start + size].view(dtype).view(shape)


def _copy_blocks(
    source: torch.Tensor, destination: torch.Tensor, copies: Sequence[BlockCopy]
) -> None:
    if source.device.type == destination.device.type == "cpu":
        source_ids, destination_ids = torch.tensor(copies, dtype=torch.int64).unbind(1)
        destination.index_copy_(0, destination_ids, source.index_select(0, source_ids))
        return
    # Between a device and pinned memory, each run of neighbouring blocks is one asynchronous copy.
    for run, length in runs_of(copies):
        sources = source[run.source : run.source + length]
        destination[run.destination : run.destination + length].copy_(sources, non_blocking=True)


def runs_of(copies: Sequence[BlockCopy]) -> Iterator[tuple[BlockCopy, int]]:
    """Copies grouped into runs of neighbouring blocks: the first copy and the length of each.

    A request's blocks were often allocated one after the other, and to launch a copy takes longer
    than to transfer a small block.
    """
    ordered = sorted(copies)
    first = 0
    for index, copy in enumerate(ordered):
        neighbour = BlockCopy(copy.source + 1, copy.destination + 1)
        if index + 1 == len(ordered) or ordered[index + 1] != neighbour:
            yield ordered[first], index + 1 - first
            first = index + 1
