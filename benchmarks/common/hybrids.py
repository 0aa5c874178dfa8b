"""Small hybrid models for benchmarks: layers of attention among layers with a recurrent state.

LFM2-S      134 M parameters, layers in the order of LFM2-350M: 10 of short convolutions
GRANITE4-S  123 M parameters, after Granite-4.0-H-350M: 10 layers of Mamba-2, 2 of attention
QWEN35-S    145 M parameters, after Qwen3.5-0.8B: 9 gated delta nets, 3 gated attentions

For long contexts there are LFM2-T and QWEN35-T of 8 layers, of which 2 have attention, and their
twins LFM2-T-FULL and QWEN35-T-FULL, of which all have it.

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


_SMALLER = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "vocab_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
}
_SMALLER_QWEN35 = {
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def _smaller(name: str, **options: Any) -> tuple[str, dict[str, Any]]:
    config_class, whole = HYBRIDS[name]
    return config_class, {**whole, **_SMALLER, **options}


_FULL = _layers(8, tuple(range(8)), "")
HYBRIDS |= {
    "LFM2-T": _smaller("LFM2-S", layer_types=_layers(8, (2, 5), "conv")),
    "LFM2-T-FULL": _smaller("LFM2-S", layer_types=_FULL),
    "QWEN35-T": _smaller(
        "QWEN35-S", **_SMALLER_QWEN35, layer_types=_layers(8, (3, 7), "linear_attention")
    ),
    "QWEN35-T-FULL": _smaller("QWEN35-S", **_SMALLER_QWEN35, layer_types=_FULL),
}
#: A small model -> its twin with attention in all layers.
TWINS = {"LFM2-T": "LFM2-T-FULL", "QWEN35-T": "QWEN35-T-FULL"}


def num_attention_layers(name: str) -> int:
    return int(HYBRIDS[name][1]["layer_types"].count("full_attention"))


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
