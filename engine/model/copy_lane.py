"""The order of block copies against a device's computations. Knows no blocks.

On CUDA copies run on a stream of their own: they begin when what was computed before them is done,
the steps that follow begin when they are done, and the thread that asked waits for neither.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class CopyLane(Protocol):
    """Where copies run."""

    def copying(self) -> AbstractContextManager[None]:
        """Copies made inside come after all computations so far and before all that follow."""
        ...


class SameLane:
    """A CPU: everything happens in the order in which it is written."""

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaLane:
    """A stream beside the one that computes.

    Args:
        cuda: `torch.cuda`, or what has its streams.
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
            # Also after a failure: a copy already begun may not be overtaken.
            computing.wait_stream(self._stream)
