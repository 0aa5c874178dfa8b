"""Stores packed weights one after another in large pieces of memory, private or shared.

Does not know what the weights mean.
"""

import torch

from engine.model.device.weight_files import Region, WeightFiles

#: The least bytes of a slab: large enough for huge pages.
SLAB_BYTES = 1 << 26
#: Of one whose file is shared: each needs a handle, and a worker has few of them.
SHARED_SLAB_BYTES = 1 << 28
#: A cache line.
ALIGNMENT = 64


class Slabs:
    """Tensors that stay where they are as long as this object lives.

    Args:
        files: where slabs become shared, each as soon as the next one is begun; None for none.
    """

    def __init__(self, files: WeightFiles | None = None) -> None:
        self._files = files
        self._regions: list[Region] = []
        self._used = self._size = 0  # Bytes of the last region.

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, after the previous one."""
        memory = self.reserve(tensor.nbytes)
        memory.copy_(tensor.contiguous().flatten().view(torch.uint8))
        return memory.view(tensor.dtype).view(tensor.shape)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """[bytes], uint8, after the previous tensor; to be filled before the next one comes."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > self._size - self._used:
            self.close()
            self._size = max(size, SLAB_BYTES if self._files is None else SHARED_SLAB_BYTES)
            self._regions.append(Region(self._size))
        memory = self._regions[-1].bytes[self._used : self._used + num_bytes]
        self._used += size
        return memory

    def close(self) -> None:
        """Share the last slab, if slabs are shared. Tensors that come later get a new one."""
        if self._files is not None and self._used:
            self._files.share(self._regions[-1], self._used)
        self._used = self._size = 0
