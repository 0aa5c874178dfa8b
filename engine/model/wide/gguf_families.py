"""The architectures of GGUF files that are served: their keys and tensors, and the model's names.

The names in files are those of llama.cpp's converter:
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py. Reads no file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from engine.model.wide.gguf_header import GgufHeader

#: The metadata keys after the architecture's name that must be there, with what they are in a
#: configuration of transformers.
NEEDED_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL_KEYS = {"vocab_size": "vocab_size", "rope.freq_base": "rope_theta"}
#: The size of a head: all that are there must have the value of the first.
HEAD_KEYS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
#: The keys whose values are numbers above 0; the others are whole numbers from 1, and a window may
#: be 0.
REAL_KEYS = frozenset(
    {
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "attn_logit_softcapping",
        "embedding_scale",
        "final_logit_softcapping",
        "logit_scale",
        "residual_scale",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
WINDOW_KEY = "attention.sliding_window"
SCALING_KEY = "rope.scaling.type"
#: The scaling of rotary frequencies by YaRN, with its names in `rope_parameters` of transformers.
YARN_KEYS = {
    SCALING_KEY: "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
#: The base of the rotary frequencies of a file that states none.
DEFAULT_BASE = 10000.0
#: Special tokens. Without them there are none: a configuration has others by default.
TOKEN_KEYS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
}
#: The array that has an element for each token.
TOKENS = "tokenizer.ggml.tokens"

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
MODEL_TENSORS = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
#: Absent where the output layer has the weights of the embedding.
HEAD = "lm_head.weight"

_QUERY, _KEY = "attn_q.weight", "attn_k.weight"
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    _QUERY: "self_attn.q_proj.weight",
    _KEY: "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_QK_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_EXPERTS = {
    **dict.fromkeys(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"), ""),
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj/0",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj/1",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What distinguishes the files of one architecture.

    Args:
        model_type: the type of transformers' configuration.
        more_tensors: of each layer, beside those of every architecture or instead of them, with
            their names in a layer of transformers. A name with `/0` or `/1` is one of two parts of
            a tensor, joined in its second dimension; one with `/even` or `/odd` has every second
            element of the last dimension; with `/row`, it is the only row of a matrix; "" means
            that the layer has no such tensor.
        more_keys: metadata that must be there, beside NEEDED_KEYS, with their names in the
            configuration.
        values: what the configuration of every file has, whatever transformers' default is.
        assumed: metadata that has no name in the configuration, each with the value that
            transformers assumes, or that must be there and have this value. A file may state
            that value, and no other.
        is_paired: the file has the rows of a head of queries and keys in the order of a rotation
            that turns neighbours, and transformers turns halves.
        norm_offset: what the file adds to the weights of norms.
        has_transposed_experts: transformers stores an expert as [inputs, outputs].
        rotary: `rope_parameters` beside those of `YARN_KEYS`, which must be there then.
    """

    model_type: str
    more_tensors: Mapping[str, str] = field(default_factory=dict)
    more_keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    assumed: Mapping[str, float | str] = field(default_factory=dict)
    is_paired: bool = False
    norm_offset: float = 0.0
    has_transposed_experts: bool = False
    rotary: Mapping[str, object] = field(default_factory=dict)

    @property
    def layer_tensors(self) -> Mapping[str, str]:
        """Of each layer: names in the file, and in a layer of transformers."""
        tensors = {**_LAYER_TENSORS, **self.more_tensors}
        return {name: renamed for name, renamed in tensors.items() if renamed}

    @property
    def needed_keys(self) -> Mapping[str, str]:
        return {**NEEDED_KEYS, **self.more_keys, **(YARN_KEYS if self.rotary else {})}

    @property
    def known_keys(self) -> frozenset[str]:
        """All metadata after the architecture's name that a file may have."""
        return frozenset({*self.needed_keys, *OPTIONAL_KEYS, *HEAD_KEYS, *self.assumed})

    def config(self, header: GgufHeader, name: str) -> PreTrainedConfig:
        """The configuration of a file of this architecture, whose name in the file is `name`.

        Raises:
            Exception: transformers does not take the values.
        """
        keys = {**self.needed_keys, **OPTIONAL_KEYS}
        values: dict[str, Any] = {
            renamed: header.metadata[f"{name}.{key}"]
            for key, renamed in keys.items()
            if f"{name}.{key}" in header.metadata
        }
        # Files of the converter have 0 for no window.
        if values.get("sliding_window") == 0:
            values["sliding_window"] = None
        heads = [f"{name}.{key}" for key in HEAD_KEYS if f"{name}.{key}" in header.metadata]
        if heads:
            values["head_dim"] = header.metadata[heads[0]]
        values |= {renamed: header.metadata.get(key) for key, renamed in TOKEN_KEYS.items()}
        # Nothing is padded, and the default may be larger than the vocabulary.
        values = {"rope_theta": DEFAULT_BASE, **values, "pad_token_id": None, **self.values}
        if self.rotary:
            rotary = {renamed: values.pop(renamed) for renamed in YARN_KEYS.values()}
            values["rope_parameters"] = rotary | dict(self.rotary)
        if TOKENS in header.lengths:
            values.setdefault("vocab_size", header.lengths[TOKENS])
        values["tie_word_embeddings"] = all(one.name != OUTPUT for one in header.tensors)
        config: PreTrainedConfig = CONFIG_MAPPING[self.model_type].from_dict(values)
        return config

    def name_of(self, tensor: str) -> str | None:
        """The name of a tensor of a file in a model's state dict; None if it has none."""
        if tensor == OUTPUT:
            return HEAD
        layer, own = layer_of(tensor)
        if layer is None:
            return MODEL_TENSORS.get(own)
        renamed = self.layer_tensors.get(own)
        return None if renamed is None else f"model.layers.{layer}.{renamed}"

    def num_paired_heads(self, tensor: str, config: PreTrainedConfig) -> int | None:
        """The heads whose rows have another order than in transformers; None for no heads."""
        if not self.is_paired:
            return None
        heads = {_QUERY: config.num_attention_heads, _KEY: config.num_key_value_heads}
        return heads.get(layer_of(tensor)[1])


_GEMMA2_TENSORS = {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_WINDOW = {WINDOW_KEY: "sliding_window"}

#: By the architecture's name in the file.
FAMILIES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", is_paired=True),
    # llama.cpp, too, has no key for the layers without rotation; every fourth one is.
    "smollm3": GgufArchitecture("smollm3", values={"no_rope_layer_interval": 4}, is_paired=True),
    "granite": GgufArchitecture(
        "granite",
        more_keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        is_paired=True,
    ),
    "qwen2": GgufArchitecture("qwen2", _QKV_BIASES),
    "qwen3": GgufArchitecture("qwen3", _QK_NORMS),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        {**_QK_NORMS, **_EXPERTS},
        more_keys=_EXPERT_KEYS,
        values={"norm_topk_prob": True},
    ),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        {
            **_QKV_BIASES,
            **_EXPERTS,
            "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
            "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
            "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
            "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight/row",
        },
        more_keys={
            **_EXPERT_KEYS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        # llama.cpp, too, has no key for it, and does not divide.
        values={"norm_topk_prob": False},
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        {
            **_QKV_BIASES,
            **_EXPERTS,
            "attn_output.bias": "self_attn.o_proj.bias",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_norm.weight": "",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_gate_inp.weight": "mlp.router.weight",
            "ffn_gate_inp.bias": "mlp.router.bias",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj/even",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias/even",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj/odd",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias/odd",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        more_keys={
            **_WINDOW,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        assumed={
            SCALING_KEY: "yarn",
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
        has_transposed_experts=True,
        # No file states that the borders between frequencies are not rounded.
        rotary={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "phi3": GgufArchitecture(
        "phi3",
        {
            **dict.fromkeys((_QUERY, _KEY, "attn_v.weight", "ffn_gate.weight"), ""),
            "attn_qkv.weight": "self_attn.qkv_proj.weight",
            "ffn_up.weight": "mlp.gate_up_proj.weight",
        },
        more_keys={
            **_WINDOW,
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
    ),
    "gemma2": GgufArchitecture(
        "gemma2",
        _GEMMA2_TENSORS,
        more_keys={
            **_WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        {**_QK_NORMS, **_GEMMA2_TENSORS},
        more_keys={**_WINDOW, "rope.freq_base": "rope_theta"},
        # Of the layers with a window.
        assumed={"rope.freq_base_swa": 10000.0},
        norm_offset=1.0,
    ),
}


def layer_of(tensor: str) -> tuple[int | None, str]:
    """The layer of a tensor of a file and its name in it; None and the whole name for no layer."""
    part = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", tensor)
    return (int(part[1]), part[2]) if part else (None, tensor)
