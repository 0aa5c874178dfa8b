"""A small configuration of every causal architecture that transformers has.

Sizes have the same few names in most families. They are replaced by small ones wherever a
configuration has a field of that name; OVERRIDES has what a family needs beyond that.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.model.builders import EOS, VOCAB_SIZE

MAX_LENGTH = 256
HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 4
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_INNER = 4, 2, 32
#: Shorter than most prompts.
WINDOW = 13

#: Small values by the name of a field.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed"), HIDDEN),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS
    ),
    "encoder_layers": 1,
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
            "encoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), KEY_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner",
            "ffn_hidden_size", "dim_ff", "dff", "shared_intermediate_size", "intermediate_size_mlp",
        ),
        INNER,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length",
            "seq_length", "max_seq_length", "n_ctx",
        ),
        MAX_LENGTH,
    ),
    **dict.fromkeys(
        (
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
            "ffn_num_experts",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k",
         "moe_k"),
        EXPERTS_PER_TOKEN,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size", "expert_intermediate_size",
        ),
        EXPERT_INNER,
    ),
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "rotary_dim": 8,
    "default_language": "en_XX",
    "sliding_window": WINDOW,
    "word_embed_proj_dim": HIDDEN,
    "embedding_size": HIDDEN,
    "emb_dim": HIDDEN,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": True,
}  # fmt: skip

#: So small that it limits nothing. transformers limits step sizes in prompts and not in decodes, so
#: that its own `generate` would differ from its forward pass.
STEP_MIN = 1e-9
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA = {"num_hidden_layers": 6}
_GEMMA4 = _GEMMA | {"hidden_size_per_layer_input": 16, "global_head_dim": 2 * HEAD_DIM}
#: The text configurations of types whose defaults do not fit together.
_TEXT_PARTS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
_GEMMA4_ASSISTANT = {
    "text_config": _GEMMA4
    | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
}

#: Values that a family needs, by the type of the configuration. Those of a configuration inside of
#: it are added to its usual ones. Patterns of layers are long enough to have each kind of layer.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY},
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KEY_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": INNER,
            "moe_num_experts": EXPERTS,
            "moe_top_k": EXPERTS_PER_TOKEN,
        },
    },
    "bailing_hybrid": {"layer_group_size": 2, "num_mtp_layers": 0},
    "blt": {"encoder_hash_byte_group_vocab": 512},
    "dots3_note_text": {"head_dim": 24},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gemma3_text": _GEMMA,
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4_assistant": _GEMMA4_ASSISTANT,
    "gemma4_unified_assistant": _GEMMA4_ASSISTANT,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": WINDOW},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": HEAD_DIM,
        "linear_num_heads": HEADS,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": MAX_LENGTH, "floor_scale": WINDOW, "attn_scale": 0.5},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2, "head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    # Its default begins with attention; if not, `generate` would miscount positions.
    "minimax": {"block_size": 8},
    # Its masks know no window; only one of at least the whole length can be served.
    "moshi": {"sliding_window": MAX_LENGTH},
    "nemotron_h": {"time_step_min": STEP_MIN},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "zamba": {"layer_types": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "time_step_min": STEP_MIN,
    },
    "zaya": {"num_experts_per_tok": 1, "attention_bias": True},
}


def types() -> list[str]:
    """Every type with a causal language model, by the name in `config.json`."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(kind: str) -> str:
    """The name of the model's class."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return found if isinstance(found, str) else found[0]


def small_config(kind: str, added: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A small configuration of this type, with other values for the fields in `added`.

    Raises:
        Exception: any that the configuration's class raises for values that do not fit together.
    """
    return _small(CONFIG_MAPPING[kind], added or {})


def _small(config_class: type[PreTrainedConfig], added: Mapping[str, Any]) -> PreTrainedConfig:
    names = set(_fields(config_class))
    values = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:
        # Keys and values come from one latent vector for all heads, and its parts have sizes.
        values.pop("head_dim", None)
        values["num_key_value_heads"] = HEADS
    if "is_decoder" in names:
        values["is_decoder"] = True
    if "text_config" in _parts(config_class):
        # The sizes are those of the text model.
        values = {}
    values |= {**OVERRIDES.get(config_class.model_type, {}), **added}
    for name, part in _parts(config_class).items():
        values[name] = _small(part, values.get(name, {}))
    return config_class(**values)


def _parts(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """The classes of the configurations inside of one; an open one gets its default class."""
    if own := _TEXT_PARTS.get(config_class.model_type):
        return {"text_config": CONFIG_MAPPING[own]}
    parts = dict(getattr(config_class, "sub_configs", None) or {})
    if any(not issubclass(part, PreTrainedConfig) for part in parts.values()):
        default = config_class()
        parts = {name: type(getattr(default, name, None)) for name in parts}
    return {name: part for name, part in parts.items() if issubclass(part, PreTrainedConfig)}


def _fields(config_class: type[PreTrainedConfig]) -> Iterable[str]:
    """The fields of a class: its annotations, and the parameters of its constructor."""
    for base in config_class.__mro__:
        if base in (PreTrainedConfig, object):
            break
        yield from getattr(base, "__annotations__", {})
        yield from getattr(base, "attribute_map", {})
    yield from inspect.signature(config_class).parameters
