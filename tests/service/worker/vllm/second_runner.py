"""vLLM's second runner on a CPU, with asynchronous scheduling: a rehearsal for GPUs.

The wheel for CPUs has this runner, but no Triton for its kernels. So Triton's interpreter runs
them, which is slow. Nothing overlaps here, but steps are planned, launched and told in the same
order.
"""

import os
from types import SimpleNamespace
from typing import Any


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def use_second_runner() -> None:
    """Let vLLM choose its second runner in this process; call it before vLLM is imported."""
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep_asynchronous(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep_asynchronous)
