"""Orders block copies against a device's computations. Knows no blocks.

On CUDA copies run on their own stream. They wait for computations launched before them, and later
computations wait for them; the calling thread waits for neither.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class CopyLane(Protocol):
    """Orders copies against computations."""

    def copying(self) -> AbstractContextManager[None]:
        """Copies in this context run after all earlier computations and before all later ones."""
        ...


class SameLane:
    """For a CPU, where everything runs in program order."""

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaLane:
    """For CUDA: a second stream, next to the one that computes.

    Args:
        cuda: `torch.cuda`, or a stand-in with streams.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream()

    @contextmanager
    def copying(self) -> Iterator[None]:
        computing = self._cuda.current_stream()
        self._stream.wait_stream(computing)
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            # Also after a failure: no computation may overtake a copy that has started.
            computing.wait_stream(self._stream)
