"""Arrays between the host and a device, and nobody waits too early. Knows no step and no model."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`: on a CPU the same memory, elsewhere a copy that may still be under way.

    What follows on the current stream comes after the copy. On CUDA a copy from ordinary memory
    would make this thread wait for everything that was asked of the device before.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # torch gives the pinned memory to nobody else before the device has read it.
    return tensor.pin_memory().to(device, non_blocking=True)


class Sender:
    """Numbers of the host that are written anew for each time they are sent to a device.

    Args:
        numbers: [most there can be] on the host, pinned if the device is a CUDA one.
        cuda: `torch.cuda`, or what has its events; None where whoever sends has copied.
    """

    def __init__(self, numbers: torch.Tensor, *, cuda: Any = None) -> None:
        self._numbers = numbers
        self._cuda = cuda
        self._sent: Any = None

    def array(self, rows: int, columns: int) -> NDArray[Any]:
        """[rows, columns] to be written: what was sent last has been read by the device."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._first(rows, columns).numpy()

    def send(self, destination: torch.Tensor) -> None:
        """Fill `destination` with what was written for its shape, behind this thread.

        They travel as one piece. Laid out among others on the host, as `destination` may be where
        it is, torch would first put them together there, in memory that the device waits for.
        """
        numbers = self._first(*destination.shape)
        destination.copy_(numbers.to(destination.device, non_blocking=True))
        if self._cuda is not None:
            self._sent = self._cuda.Event()
            self._sent.record()

    def _first(self, rows: int, columns: int) -> torch.Tensor:
        return self._numbers[: rows * columns].view(rows, columns)


class ToHost:
    """Numbers of a device on their way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[Any]:
        """Wait until they are here, and for nothing that was asked of the device later.

        Returns:
            As `Tensor.tolist`.
        """
        if self._done is not None:
            self._done.synchronize()
        numbers: list[Any] = self._here.tolist()
        return numbers
