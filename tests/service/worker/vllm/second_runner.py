"""vLLM's second runner on a CPU, with asynchronous scheduling: a rehearsal for GPUs.

The wheel for CPUs has this runner, but no Triton for its kernels. So Triton's interpreter runs
them, which is slow. Nothing overlaps here, but steps are planned, launched and told in the same
order.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

_INTERPRETED = Path(__file__).parent / "interpreted"


def use_second_runner() -> None:
    """Let vLLM choose it here and in the ranks; call it before vLLM is imported."""
    path = os.pathsep.join(filter(None, [str(_INTERPRETED), os.environ.get("PYTHONPATH")]))
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": path,
        # torch's compiler asks Triton for a target, which the interpreter does not have.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
    }
    import_module("tests.service.worker.vllm.interpreted.sitecustomize")
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep_asynchronous(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep_asynchronous)
