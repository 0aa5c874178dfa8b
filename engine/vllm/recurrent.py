"""Models with a recurrent state in vLLM: which of them a CPU serves, and how. Knows no vllm.

`tests.golden_models.vllm_hybrids` compares them with transformers and records what it finds.
"""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelRefused

_NO_SCAN = "vLLM 0.32 has no kernel for the state of Mamba on a CPU"
_TRITON = "vLLM 0.32 computes its linear attention with Triton, which has no kernels for a CPU"
_KIMI = "vLLM 0.32 does not start it on a CPU without a prefix cache"
_ROTARY = "vLLM 0.32 computes other rotary positions than transformers on a CPU"
#: Why a CPU does not serve an architecture that vLLM lists.
NOT_ON_CPU: Mapping[str, str] = {
    "FalconMambaForCausalLM": _NO_SCAN,
    "JambaForCausalLM": _NO_SCAN,
    "KimiLinearForCausalLM": _KIMI,
    "Lfm2ForCausalLM": _ROTARY,
    "Lfm2MoeForCausalLM": _ROTARY,
    "MambaForCausalLM": _NO_SCAN,
    "OlmoHybridForCausalLM": _TRITON,
}


def refuse_if_wrong(model_config: Any, *, is_cpu: bool) -> None:
    """Refuse a model of vLLM's config that would fail in a step, or get other tokens.

    Raises:
        ModelRefused: its architecture is in NOT_ON_CPU, and this is a CPU.
    """
    architecture = model_config.architecture
    if is_cpu and (reason := NOT_ON_CPU.get(architecture)):
        raise ModelRefused(f"{architecture}: {reason}")


def caches_prefixes(model_config: Any, *, is_cpu: bool) -> bool:
    """Whether vLLM may cache prefixes of this model.

    The keys of a prefix are useless without the state behind it, so vLLM keeps states, too. On a
    CPU, vLLM 0.32 then fails in a step with two prompts, and with it all requests of the worker.
    """
    return not (is_cpu and model_config.has_inner_state)
