"""Computes with one thread of torch. Knows no operation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in this thread alone, inside the context or the decorated function.

    Each of many short operations would wait for all threads: on a busy machine, far longer than it
    computes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
