"""Arrays of the host become tensors of a device, and nobody waits. Knows no step and no model."""

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
    if device.type != "cuda":
        return tensor.to(device)
    # torch gives the pinned memory to nobody else before the device has read it.
    return tensor.pin_memory().to(device, non_blocking=True)
