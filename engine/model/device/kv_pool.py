"""The keys and values of all blocks, on the device and in a bounded pool on the host.

Beside them are the recurrent states of a model that has some. It has only the tensors;
`engine.cache.block_pool` knows the owners of blocks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import BlockCopy
from engine.model.device.copy_lane import CopyLane, CudaLane, SameLane
from engine.model.device.quantized_kv import (
    QUANTIZED,
    integers_of,
    quantize,
    scales_of,
    slot_bytes,
)
from engine.model.device.state_pool import StatePool

#: Alignment of blocks on a CPU; without it, every row of a block would span two cache lines.
CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `kv_heads` keys of `key_dim` and values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """Two tensors [num_blocks, kv_heads, block_size, dim] per layer, on device and on host.

    A block is contiguous in every tensor: so copying a block takes few, long copies, and a kernel
    reads one key head's part of a block sequentially. The tensors of a quantized pool are
    [num_blocks, kv_heads, bytes]: the scales are inside the block (see `quantized_kv`).

    Args:
        shapes: one per layer that attends, in the order the model calls them.
        num_blocks: blocks on `device`.
        block_size: token slots per block.
        dtype: of keys and values: the model's, so that storing them rounds nothing, or
            `QUANTIZED`.
        num_host_blocks: blocks on the host, for requests preempted by swap.
        has_spare_block: adds one block that no request gets, to which padding is written.
        lane: orders swaps against computations; the default depends on the device.
        states: the recurrent states of the model's other layers; None if it has none.
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
        states: StatePool | None = None,
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1 and num_host_blocks >= 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.is_quantized = dtype == QUANTIZED
        self.states = states

        target = torch.device(device)
        on_cuda = target.type == "cuda"
        self._lane = lane or (CudaLane() if on_cuda else SameLane())

        def of_head(dim: int) -> tuple[int, ...]:
            return (block_size * slot_bytes(dim),) if self.is_quantized else (block_size, dim)

        def tensors(count: int, where: torch.device, *, pinned: bool = False) -> list[torch.Tensor]:
            return [
                _zeros((count, shape.kv_heads, *of_head(dim)), dtype, where, pinned=pinned)
                for shape in shapes
                for dim in (shape.key_dim, shape.value_dim)
            ]

        self._has_spare_block = has_spare_block
        self._device_tensors = tensors(num_blocks + has_spare_block, target)
        # Pinned, because only copies from and to pinned memory are asynchronous.
        pinned = on_cuda and num_host_blocks > 0
        self._host_tensors = tensors(num_host_blocks, torch.device("cpu"), pinned=pinned)

    @property
    def spare_block(self) -> int:
        """The id of the spare block; it is the last id."""
        assert self._has_spare_block
        return self.num_blocks

    def key_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, key_dim] or quantized, the spare block included."""
        return self._device_tensors[2 * layer]

    def value_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, value_dim] or quantized, with the spare block."""
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
        for cache, heads in ((self.key_cache(layer), key), (self.value_cache(layer), value)):
            if not self.is_quantized:
                cache[slots.blocks, :, slots.offsets] = heads
                continue
            integers, scales = quantize(heads)
            integers_of(cache, self.block_size)[slots.blocks, :, slots.offsets] = integers
            scales_of(cache, self.block_size)[slots.blocks, :, slots.offsets] = scales

    def touch(self, blocks: range) -> None:
        """Touch the memory of unused blocks, so that its pages are mapped before the first write.

        The blocks are zero before and after. On a CPU the system maps pages only when they are
        touched.
        """
        for tensor in self._device_tensors:
            tensor[blocks.start : blocks.stop].zero_()

    def spoil(self) -> None:
        """Make every slot NaN, for checks: reading an unwritten one then changes the logits."""
        for tensor in self._device_tensors:
            numbers = scales_of(tensor, self.block_size) if self.is_quantized else tensor
            numbers.fill_(torch.nan)

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zero the blocks that this step starts but does not fill.

        Attention reads whole blocks and gives unwritten slots a weight of 0, so their contents must
        be finite: otherwise a NaN of an earlier owner would reach the next request.
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
    """The cache slot of each token of a step: two [tokens] index tensors."""

    blocks: torch.Tensor
    offsets: torch.Tensor


def bytes_per_block(shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of such a pool, computed from a pool of one block without storage."""
    return KVPool(
        shapes, num_blocks=1, block_size=block_size, dtype=dtype, device="meta"
    ).bytes_per_block


def num_blocks_for(
    memory_bytes: int, shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype
) -> int:
    """How many blocks fit in `memory_bytes`; possibly 0."""
    return max(0, memory_bytes) // bytes_per_block(shapes, block_size=block_size, dtype=dtype)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, where: torch.device, *, pinned: bool
) -> torch.Tensor:
    """Zeros, which on a CPU cost nothing until a block is first used.

    Not uninitialized memory, because an attention weight of 0 times an old NaN is NaN. torch.zeros
    would write them, which takes seconds for a pool of many gigabytes. numpy gets zero pages from
    the system, which maps them when they are touched.
    """
    if where.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned)
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
    # Between a device and pinned memory, each run of adjacent blocks is one asynchronous copy.
    for run, length in runs_of(copies):
        sources = source[run.source : run.source + length]
        destination[run.destination : run.destination + length].copy_(sources, non_blocking=True)


def runs_of(copies: Sequence[BlockCopy]) -> Iterator[tuple[BlockCopy, int]]:
    """Group copies into runs of adjacent blocks; yields the first copy and the length of each run.

    A request's blocks are often allocated one after the other, and launching a copy takes longer
    than transferring a small block.
    """
    ordered = sorted(copies)
    first = 0
    for index, copy in enumerate(ordered):
        neighbour = BlockCopy(copy.source + 1, copy.destination + 1)
        if index + 1 == len(ordered) or ordered[index + 1] != neighbour:
            yield ordered[first], index + 1 - first
            first = index + 1
