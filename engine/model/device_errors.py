"""Tells a device that is lost from a step that failed. Knows no step and no model."""

import torch

#: What a sticky CUDA error looks like where torch has no type of its own for it.
_STICKY_MESSAGES = (
    "CUDA error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "device-side assert",
    # Who launches the first kernel after an error is told of it, and that may be Triton.
    "Triton Error [CUDA]",
)


def is_device_failure(error: BaseException) -> bool:
    """Whether a CUDA error outlives its step.

    Running out of memory fails one allocation and leaves the device as it was; an illegal address,
    a failed assertion in a kernel or a lost device poisons every call that follows.
    """
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return False
    sticky_type = getattr(torch, "AcceleratorError", None)
    if sticky_type is not None and isinstance(error, sticky_type):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in _STICKY_MESSAGES
    )
