"""Distinguishes a lost device from a failed step. Knows no step and no model."""

import torch

#: Texts of sticky CUDA errors, for which some releases of torch have no exception type.
_STICKY_MESSAGES = (
    "CUDA error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "device-side assert",
    # CUDA reports an error at the next kernel launch, which may be Triton's.
    "Triton Error [CUDA]",
)


def is_device_failure(error: BaseException) -> bool:
    """Whether a CUDA error outlives its step.

    Running out of memory fails one allocation and leaves the device usable. After an illegal
    address, a failed assertion in a kernel or a lost device, every later call fails too.
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
    """Whether the error says that memory ran out, on the host or on the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def cause_of(error: BaseException) -> str:
    """The first line of the original error; the error of a failed capture hides the original one.

    The other lines of a device error are torch's advice on debugging.
    """
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
