"""Converts a transformers config to the config of the common decoder. Reads no weights.

Llama, Mistral, Qwen 2 and 3, SmolLM 3, Phi 3, Granite and OLMo 2 are one architecture with options.
Every field of a config must be known here: with an unknown field or an unexpected value the model
is served by the wide path. Nothing is ignored silently.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.model.wide.transformers_model import TransformersModel

#: Rotary types whose frequencies depend neither on the position nor on the sequence length.
ROTARY_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

#: Model types that `DecoderConfig` can describe.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "olmo2"})

#: Fields that `read_config` uses, directly or through the modules that were built from them.
_READ = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "rope_parameters",
        "no_rope_layers",
        "no_rope_layer_interval",
        # The probe has found the windows from the attention masks.
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    }
)
#: Fields with the only value that `DecoderConfig` can describe.
_EXPECTED: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
}
#: Fields without effect on a forward pass in evaluation mode.
_HARMLESS = frozenset(
    {
        "transformers_version",
        "architectures",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "dtype",
        "id2label",
        "label2id",
        "problem_type",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "pretraining_tp",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "_name_or_path",
    }
)


class NotSupported(Exception):
    """The fast path cannot compute this model. The message is one sentence that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The common decoder's sizes and options.

    Args:
        rotary_dim: leading dimensions of a head that are rotated, in pairs (i, i + rotary_dim / 2).
        inverse_frequencies: [rotary_dim / 2], float32.
        rotary_scaling: factor of the cosines and sines.
        scaling: factor of the attention scores.
        norms_whole_projections: query and key norms, if any, are over all heads together.
        windows: per layer, the number of keys a token sees, itself included; None for all.
        rotates: per layer, whether queries and keys are rotated at all.
        residual_multiplier: factor of each block's output before it is added to the residual
            stream.
        logits_divisor: the logits are divided by it.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    scaling: float
    rotary_dim: int
    inverse_frequencies: torch.Tensor
    rotary_scaling: float
    norms_whole_projections: bool
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def read_config(served: TransformersModel) -> DecoderConfig:
    """The config of a model that the wide path serves.

    Raises:
        NotSupported: it has an option that `DecoderConfig` cannot describe.
    """
    config = served.model.config
    fields = _checked_fields(config)
    (shape,) = set(served.layer_shapes) if len(set(served.layer_shapes)) == 1 else (None,)
    if shape is None or shape.key_dim != shape.value_dim:
        raise NotSupported("its layers have keys and values of different shapes")
    rotary = _rotary(served)
    frequencies = rotary.inv_freq.detach().float().cpu()
    scalings = {float(layer.module.scaling) for layer in served.layers}  # type: ignore[arg-type]
    if len(scalings) != 1:
        raise NotSupported("its layers scale their scores differently")
    num_layers = len(served.layers)
    return DecoderConfig(
        family=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.key_dim,
        vocab_size=served.vocab_size,
        epsilon=config.rms_norm_eps,
        scaling=scalings.pop(),
        rotary_dim=2 * len(frequencies),
        inverse_frequencies=frequencies,
        rotary_scaling=float(rotary.attention_scaling),
        norms_whole_projections=config.model_type == "olmo2",
        windows=tuple(layer.sliding_window for layer in served.layers),
        rotates=tuple(map(bool, fields.get("no_rope_layers") or [True] * num_layers)),
        embedding_multiplier=float(fields.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(fields.get("residual_multiplier", 1.0)),
        logits_divisor=float(fields.get("logits_scaling", 1.0)),
    )


def _checked_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that the model's code reads; NotSupported if one of them is not supported."""
    if config.model_type not in FAMILIES:
        raise NotSupported(f"the model type {config.model_type} is not supported")
    values = config.to_dict()
    # The model's code reads only fields that its config class declares, and `quantization_config`.
    own = type(config)().to_dict().keys()
    for name in own - _READ - _HARMLESS - _EXPECTED.keys():
        raise NotSupported(f"the field {name!r} of its config is not supported")
    for name, expected in _EXPECTED.items():
        if values.get(name, expected) != expected:
            raise NotSupported(f"its config has {name} = {values[name]!r}")
    if values.get("quantization_config"):
        raise NotSupported("its weights are quantized")
    return {name: value for name, value in values.items() if name in own}


def _rotary(served: TransformersModel) -> Any:
    """The model's own rotary module, which has resolved the config's several notations."""
    rotary: Any = getattr(served.model.base_model, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if kind not in ROTARY_TYPES:
        raise NotSupported(f"its rotary embedding has the type {kind!r}")
    return rotary
