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
    if is_out_of_memory(error):
        return False
    sticky_type = getattr(torch, "AcceleratorError", None)
    if sticky_type is not None and isinstance(error, sticky_type):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in _STICKY_MESSAGES
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or the device, whoever asked for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def cause_of(error: BaseException) -> str:
    """What went wrong first, in one line: torch ends a failed capture with an error that hides it.

    And it adds to most errors of a device how to look for more.
    """
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
