"""Copies between host and device that wait as late as possible. Knows no step and no model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`: on a CPU the same memory, elsewhere a copy that may still be under way.

    Work queued on the current stream later comes after the copy. On CUDA the array goes through
    pinned memory: a copy from pageable memory would wait for all that was queued before.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # torch does not reuse the pinned memory before the device has read it.
    return tensor.pin_memory().to(device, non_blocking=True)


def index_on(
    indices: Sequence[int] | Sequence[tuple[int, int]], device: torch.device
) -> torch.Tensor:
    """[indices] or [indices, 2], to index with."""
    return to_device(np.array(indices, dtype=np.int64), device)


class Sender:
    """A reusable host buffer whose content is sent to a device again and again.

    Args:
        numbers: [capacity] on the host, pinned if the device is a CUDA one.
        cuda: `torch.cuda`, or a double with its events; None where copies are synchronous.
    """

    def __init__(self, numbers: torch.Tensor, *, cuda: Any = None) -> None:
        self._numbers = numbers
        self._cuda = cuda
        self._sent: Any = None

    def array(self, rows: int, columns: int) -> NDArray[Any]:
        """[rows, columns] of the buffer, to be written; waits until the last send has been read."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._first(rows, columns).numpy()

    def send(self, destination: torch.Tensor) -> None:
        """Fill `destination` with what was written for its shape, without waiting.

        Contiguous on the host even where `destination` is not: torch would otherwise first gather
        it in pageable memory, and the copy would wait.
        """
        numbers = self._first(*destination.shape)
        destination.copy_(numbers.to(destination.device, non_blocking=True))
        if self._cuda is not None:
            self._sent = self._cuda.Event()
            self._sent.record()

    def _first(self, rows: int, columns: int) -> torch.Tensor:
        return self._numbers[: rows * columns].view(rows, columns)


class ToHost:
    """A tensor on its way from a device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[Any]:
        """Wait until it is here, and for nothing that was queued on the device later.

        Returns:
            As `Tensor.tolist`.
        """
        if self._done is not None:
            self._done.synchronize()
        numbers: list[Any] = self._here.tolist()
        return numbers
