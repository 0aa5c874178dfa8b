"""Small hybrid models for benchmarks: layers of attention among layers with a recurrent state.

LFM2-S      134 M parameters, layers in the order of LFM2-350M: 10 of short convolutions
GRANITE4-S  123 M parameters, after Granite-4.0-H-350M: 10 layers of Mamba-2, 2 of attention
QWEN35-S    145 M parameters, after Qwen3.5-0.8B: 9 gated delta nets, 3 gated attentions

With the random weights of transformers, a state would hardly matter: kernels of convolutions
would be so small that a layer adds nothing, and states would fade within a token. So both get
values as in trained models (`give_memory`), and a lost state changes tokens.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: Standard deviation of the kernels of convolutions.
KERNEL_SPREAD = 0.5
#: The range of the step sizes of a state, log-uniform (Mamba's initialisation).
STEP_SIZES = (1e-3, 1e-1)
#: Enough for the longest context that is measured.
MAX_POSITIONS = 65536

_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "vocab_size": 32768,
    "max_position_embeddings": MAX_POSITIONS,
}
_LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
_GRANITE4_ATTENTION = (4, 9)


def _layers(count: int, attention: tuple[int, ...], other: str) -> list[str]:
    return ["full_attention" if index in attention else other for index in range(count)]


#: Name -> the config class of transformers, and its options.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LFM2-S": (
        "Lfm2Config",
        {
            **_SIZES,
            "block_auto_adjust_ff_dim": False,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_hidden_layers": 16,
            "layer_types": _layers(16, _LFM2_ATTENTION, "conv"),
        },
    ),
    "GRANITE4-S": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_hidden_layers": 12,
            "layer_types": _layers(12, _GRANITE4_ATTENTION, "linear_attention"),
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "attention_multiplier": 1 / 64,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.246,
            "logits_scaling": 3.0,
        },
    ),
    "QWEN35-S": (
        "Qwen3_5TextConfig",
        {
            **_SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 12,
            "layer_types": _layers(12, (3, 7, 11), "linear_attention"),
            "linear_num_key_heads": 12,
            "linear_num_value_heads": 12,
        },
    ),
}


def give_memory(model: "nn.Module") -> None:
    """Give kernels and decays of a hybrid model with random weights values as in trained ones."""
    import torch

    low, high = (math.log(size) for size in STEP_SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("conv.weight", "conv1d.weight")):
                parameter.normal_(std=KERNEL_SPREAD)
            elif name.endswith(".dt_bias"):
                size = torch.empty_like(parameter).uniform_(low, high).exp()
                # What softplus turns into the step size.
                parameter.copy_(size.expm1().log())
