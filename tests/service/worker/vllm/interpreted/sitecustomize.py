"""For each Python whose path has this folder: Triton says that it has a backend for CPUs.

vLLM asks Triton before it chooses its second runner, also in the processes of its ranks. Triton's
interpreter then runs the kernels.
"""

import sys
from types import SimpleNamespace


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def pretend() -> None:
    """Add the backend; before vLLM is imported."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)


if not any("resource_tracker" in word for word in sys.orig_argv):
    pretend()
