"""Copies between host and device that wait as late as possible. Knows no step and no model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`: the same memory on a CPU, elsewhere a possibly asynchronous copy.

    Work that is queued on the current stream later runs after the copy. On CUDA the array is copied
    through pinned memory: a copy from pageable memory would wait for all work queued before.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # torch reuses the pinned memory only after the device has read it.
    return tensor.pin_memory().to(device, non_blocking=True)


def index_on(
    indices: Sequence[int] | Sequence[tuple[int, int]], device: torch.device
) -> torch.Tensor:
    """Indices as a tensor [indices] or [indices, 2] on `device`."""
    return to_device(np.array(indices, dtype=np.int64), device)


class Sender:
    """A reusable host buffer, from which data are sent to a device repeatedly.

    Args:
        numbers: [capacity] on the host, pinned for a CUDA device.
        cuda: `torch.cuda`, or a test double with its events; None if copies are synchronous.
    """

    def __init__(self, numbers: torch.Tensor, *, cuda: Any = None) -> None:
        self._numbers = numbers
        self._cuda = cuda
        self._sent: Any = None

    def array(self, rows: int, columns: int) -> NDArray[Any]:
        """[rows, columns] of the buffer, to write to. Waits until the last send has completed."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._first(rows, columns).numpy()

    def send(self, destination: torch.Tensor) -> None:
        """Copy the array of the same shape to `destination`, without waiting.

        The array is contiguous on the host even if `destination` is not: otherwise torch would
        first gather it in pageable memory, and the copy would block.
        """
        numbers = self._first(*destination.shape)
        destination.copy_(numbers.to(destination.device, non_blocking=True))
        if self._cuda is not None:
            self._sent = self._cuda.Event()
            self._sent.record()

    def _first(self, rows: int, columns: int) -> torch.Tensor:
        return self._numbers[: rows * columns].view(rows, columns)


class ToHost:
    """An asynchronous copy of a tensor from a device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[Any]:
        """Wait for the copy, but not for work queued on the device later.

        Returns:
            The values, as `Tensor.tolist`.
        """
        if self._done is not None:
            self._done.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers
