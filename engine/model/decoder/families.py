"""What the code of each model family computes whatever its config says. Knows no config.

The common decoder has no branch for a family: a family is one row of `FAMILIES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

#: What a layer has before its gates: attention, or something with a recurrent state.
Mixer = Literal["attention", "convolution", "delta_net", "state_space"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The names of a layer's tensors, and how its norms are computed.

    Args:
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm: the name of each norm in the
            state dict; None if the family does not have it. A post norm is applied to the outputs
            of its block, before they are added to the residual stream.
        final_norm: the name of the norm after the last layer.
        query_norm, key_norm: the names of the norms in an attention, if it has any.
        qkv, gate_up: the linear layers that become one.
        output, down: the linear layers after attention, and after the gates.
        gates_attention: the projection of queries has a gate beside each query head, and the output
            of the head is multiplied by its sigmoid.
        recurrent: the mixer of the layers without attention, if there are any.
        mlp: the module with the gates.
        experts: the module with the experts beside these gates; None if that of the gates has
            experts instead of them.
        norm_offset: a norm multiplies by `norm_offset + weight`.
        norms_round_once: a norm multiplies in float32 and rounds the product. Otherwise it rounds
            before it multiplies.
        norms_whole_projections: query and key norms, if any, are over all heads together.
        router: the linear layer of an expert layer that scores the experts.
        has_transposed_experts: experts are stored [inputs, outputs], a gate beside its up.
        normalizes_experts: the weights of a token's experts add up to one, unless the config says
            otherwise.
    """

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    final_norm: str = "norm"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    gates_attention: bool = False
    recurrent: Mixer | None = None
    mlp: str = "mlp"
    experts: str | None = None
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    norm_offset: float = 0.0
    norms_round_once: bool = False
    norms_whole_projections: bool = False
    router: str = "gate"
    has_transposed_experts: bool = False
    normalizes_experts: bool = True


_LLAMA = Family()
_GEMMA = Family(norm_offset=1.0, norms_round_once=True)
_GEMMA2 = replace(
    _GEMMA,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

#: By model type.
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    # The Qwen-VL text models have three rotary positions per token, equal in a text.
    "qwen2_vl_text": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "qwen3_vl_text": _LLAMA,
    "qwen3_vl_moe_text": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "granite_swa": _LLAMA,
    "granitemoehybrid": replace(
        _LLAMA,
        recurrent="state_space",
        mlp="shared_mlp",
        experts="block_sparse_moe",
        router="router",
        gate_up=("input_linear",),
        down="output_linear",
    ),
    "phi3": replace(_LLAMA, qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "olmo2": replace(
        _LLAMA,
        attention_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
        norms_whole_projections=True,
    ),
    "gpt_oss": replace(_LLAMA, norms_round_once=True, router="router", has_transposed_experts=True),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    # As in Qwen-VL, three positions per token that are equal in a text.
    "qwen3_5_text": replace(_GEMMA, gates_attention=True, recurrent="delta_net"),
    "lfm2": replace(
        _LLAMA,
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        final_norm="embedding_norm",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        output="out_proj",
        recurrent="convolution",
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
    ),
}
