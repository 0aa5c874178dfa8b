"""Launches Triton kernels. Knows no kernel, only what stops Triton on a machine.

Triton compiles a kernel when it is first launched, and a launcher for it in C, and keeps both in a
folder. What is missing there shows at the first launch, by many types of errors.
"""

import subprocess
from collections.abc import Sequence
from typing import Any

from engine.model.device.device_errors import cause_of
from engine.model.kernels.build import KernelsUnavailable


class Launcher:
    """Launches the kernels of a module, which also has Triton's type of error, `TritonError`."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._launched: set[str] = set()
        # A kernel may be compiled, and its code stored, at any launch.
        self._refusals = (kernels.TritonError, OSError, subprocess.SubprocessError)
        # Triton also raises these if a compiler or the driver is missing. After a kernel has been
        # launched, they are errors of the device.
        self._first_refusals = (*self._refusals, RuntimeError, AssertionError, ImportError)

    def __call__(self, name: str, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Launch the kernel `name` with `grid` programs.

        Raises:
            KernelsUnavailable: Triton cannot compile or start it on this machine.
        """
        refusals = self._refusals if name in self._launched else self._first_refusals
        try:
            getattr(self._kernels, name)[tuple(grid)](*arguments, **constants)
        except refusals as error:
            raise KernelsUnavailable(
                f"Triton cannot run its kernels here: {cause_of(error)}"
            ) from error
        self._launched.add(name)
