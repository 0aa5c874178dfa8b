"""Refuses a GGUF file whose metadata or tensors are not known, are of a wrong type, or do not fit.

Knows no values of tensors.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from engine.errors import ModelRefused
from engine.model.wide.gguf_families import (
    FAMILIES,
    HEAD,
    HEAD_KEYS,
    MODEL_TENSORS,
    OUTPUT,
    REAL_KEYS,
    SCALING_KEY,
    WINDOW_KEY,
    layer_of,
)
from engine.model.wide.gguf_header import GgufHeader, Scalar
from engine.model.wide.gguf_rotary import DIVISORS

#: The largest count or size in metadata; torch counts elements in 63 bits.
MAX_COUNT = (1 << 31) - 1
#: The number of layers of the one Gemma 3 whose scores are scaled otherwise than by the size of a
#: head. The file does not state the scale; llama.cpp derives it from this number.
GEMMA3_OTHER_SCALE_LAYERS = 62
#: The parts of a tensor that has gates and ups in turns.
HALVES = ("even", "odd")


def check_metadata(header: GgufHeader, name: str, file: Path) -> None:
    """Refuse keys of the architecture that are missing, not known, or have no sound value."""
    prefix, architecture = f"{name}.", FAMILIES[name]
    for key in header.lengths:
        if key.startswith(prefix):
            raise ModelRefused(f"{file} has a value for each layer in {key}, which is not served")
    for key in architecture.needed_keys:
        if prefix + key not in header.metadata:
            raise ModelRefused(f"{file} has no {prefix}{key} in its metadata")
    for key in header.metadata:
        if not key.startswith(prefix) or _is_no_scaling(header, key):
            continue
        own, value = key.removeprefix(prefix), header.metadata[key]
        if own not in architecture.known_keys:
            raise ModelRefused(
                f"{file} sets {key} to {value!r}, which is not read of the architecture {name!r}"
            )
        if not _is_sound(own, value):
            raise ModelRefused(f"{file} is damaged: it sets {key} to {value!r}")
        assumed = architecture.assumed.get(own, value)
        if value != assumed:
            raise ModelRefused(f"{file} sets {key} to {value}, and transformers assumes {assumed}")


def _is_no_scaling(header: GgufHeader, key: str) -> bool:
    return key.endswith(".rope.scaling.type") and header.metadata[key] == "none"


def _is_sound(key: str, value: Scalar) -> bool:
    """Whether the value of a known key is of its type and in its range."""
    if key == SCALING_KEY:
        return isinstance(value, str)
    if key in REAL_KEYS:
        return isinstance(value, float) and 0 < value < math.inf
    least = 0 if key == WINDOW_KEY else 1
    return type(value) is int and least <= value <= MAX_COUNT


def check_tensors(header: GgufHeader, name: str, file: Path) -> None:
    """Refuse a file that lacks a tensor, or has one that is not read."""
    num_layers = int(header.metadata[f"{name}.block_count"])
    layer_tensors = FAMILIES[name].layer_tensors
    found = {tensor.name for tensor in header.tensors}
    for tensor in MODEL_TENSORS:
        if tensor not in found:
            raise ModelRefused(f"{file} lacks the tensor {tensor}")
    # The first layer that is missing ends the loop, however large the number of layers is.
    for layer in range(num_layers):
        for tensor in layer_tensors:
            if f"blk.{layer}.{tensor}" not in found:
                raise ModelRefused(f"{file} lacks the tensor blk.{layer}.{tensor}")
    read = {*MODEL_TENSORS, OUTPUT, *([DIVISORS] if name == "llama" else [])}
    for tensor in sorted(found - read):
        number, own = layer_of(tensor)
        if number is None or number >= num_layers or own not in layer_tensors:
            raise ModelRefused(
                f"{file} has the tensor {tensor}, which is not read of the architecture {name!r}"
            )


def check_sizes(
    header: GgufHeader, architecture: str, config: PreTrainedConfig, file: Path
) -> None:
    """Refuse sizes that contradict the tensors: memory would be allocated for them."""
    family = FAMILIES[architecture]
    head_dim = head_dim_of(config)
    for key in HEAD_KEYS:
        value = header.metadata.get(f"{architecture}.{key}", head_dim)
        if value != head_dim:
            raise ModelRefused(
                f"{file} sets {architecture}.{key} to {value}, and transformers reads a head of "
                f"{head_dim}"
            )
    if head_dim % 2:
        raise ModelRefused(f"{file} has heads of {head_dim}, which cannot be rotated in pairs")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelRefused(f"{file} has {heads} heads, which {kv_heads} of keys cannot share")
    if architecture.startswith("gemma"):
        _check_scale(config, file)
    experts, used = (getattr(config, name, 1) for name in ("num_experts", "num_experts_per_tok"))
    if used > experts:
        raise ModelRefused(f"{file} is damaged: a token uses {used} of {experts} experts")
    shapes = _shapes(config)
    for tensor in header.tensors:
        name = family.name_of(tensor.name)
        if name is None:
            continue
        shape = shapes[re.sub(r"^model\.layers\.\d+\.", "", name)]
        if tensor.shape[::-1] != shape:
            raise ModelRefused(
                f"{file} stores {tensor.name} with the shape {tensor.shape}; its metadata says "
                f"{shape[::-1]}"
            )


def _shapes(config: PreTrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """Of each tensor of a model, or of one of its layers, by its name in transformers."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, head_dim_of(config)
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    experts = getattr(config, "num_experts", 0)
    size = getattr(config, "moe_intermediate_size", inner)
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
    return {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        HEAD: (config.vocab_size, hidden),
        **{f"{norm}.weight": (hidden,) for norm in (*norms, "post_feedforward_layernorm")},
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.gate_up_proj.weight": (2 * inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj/0": (experts, size, hidden),
        "mlp.experts.gate_up_proj/1": (experts, size, hidden),
        "mlp.experts.down_proj": (experts, hidden, size),
        "self_attn.sinks": (config.num_attention_heads,),
        "self_attn.o_proj.bias": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        **{f"mlp.experts.gate_up_proj/{half}": (experts, size, hidden) for half in HALVES},
        **{f"mlp.experts.gate_up_proj_bias/{half}": (experts, size) for half in HALVES},
        "mlp.experts.down_proj_bias": (experts, hidden),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight/row": (hidden,),
    }


def _check_scale(config: PreTrainedConfig, file: Path) -> None:
    """Refuse a Gemma whose scores transformers would scale otherwise than it was trained."""
    scaled_by = config.query_pre_attn_scalar
    if config.num_hidden_layers == GEMMA3_OTHER_SCALE_LAYERS or config.head_dim != scaled_by:
        raise ModelRefused(
            f"{file} is a Gemma with {config.num_hidden_layers} layers and heads of "
            f"{config.head_dim}; transformers scales the scores of every such file for heads of "
            f"{scaled_by}, which is wrong for it; use the folder with safetensors"
        )


def head_dim_of(config: PreTrainedConfig) -> int:
    """The size of a head, which not every configuration states."""
    heads = config.num_attention_heads
    return int(getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
