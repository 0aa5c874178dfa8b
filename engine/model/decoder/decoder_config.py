"""Reads a transformers config as one description of the common decoder; knows no weights' values.

Llama, Mistral, Qwen 2 and 3, SmolLM 3, Phi 3, Granite and OLMo 2 are one architecture with options.
A config is understood field by field: a field this module has never heard of, or a value it does
not expect, means that the model is left to the wide path, never that something is dropped.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.model.wide.transformers_model import TransformersModel

#: Rotary kinds whose frequencies are the same for every position and sequence length.
ROTARY_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

#: Families that this description covers.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "olmo2"})

#: Fields that become part of the description, here or through the modules that hold them.
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
        # The probe found the windows by asking the masks.
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    }
)
#: Fields with the one value that this description means.
_EXPECTED: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
}
#: Fields that say nothing about a forward pass in evaluation mode.
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


class NotCommon(Exception):
    """The model is not the common decoder; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The common decoder's sizes and options.

    Args:
        rotary_dim: leading dimensions of a head that are rotated, in pairs (i, i + rotary_dim / 2).
        inverse_frequencies: [rotary_dim / 2], float32.
        rotary_scaling: factor of the cosines and sines.
        scaling: factor of the attention scores.
        norms_whole_projections: the query and key norms, if any, span all heads.
        windows: per layer, keys a token sees, itself included; None for all.
        rotates: per layer, whether positions are encoded at all.
        residual_multiplier: of what a block adds to the residual stream.
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
    """The description of a model that the wide path serves.

    Raises:
        NotCommon: something about it is not understood here.
    """
    config = served.model.config
    fields = _checked_fields(config)
    (shape,) = set(served.layer_shapes) if len(set(served.layer_shapes)) == 1 else (None,)
    if shape is None or shape.key_dim != shape.value_dim:
        raise NotCommon("its layers keep keys and values of different shapes")
    rotary = _rotary(served)
    frequencies = rotary.inv_freq.detach().float().cpu()
    scalings = {float(layer.module.scaling) for layer in served.layers}  # type: ignore[arg-type]
    if len(scalings) != 1:
        raise NotCommon("its layers scale their scores differently")
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
    """The fields that the model's code reads, all of them understood."""
    if config.model_type not in FAMILIES:
        raise NotCommon(f"the family {config.model_type} is not described")
    values = config.to_dict()
    # Fields the class does not know are read by nobody, but for the one that changes the weights.
    own = type(config)().to_dict().keys()
    for name in own - _READ - _HARMLESS - _EXPECTED.keys():
        raise NotCommon(f"the field {name!r} of its config is not described")
    for name, expected in _EXPECTED.items():
        if values.get(name, expected) != expected:
            raise NotCommon(f"its config has {name} = {values[name]!r}")
    if values.get("quantization_config"):
        raise NotCommon("its weights are quantized")
    return {name: value for name, value in values.items() if name in own}


def _rotary(served: TransformersModel) -> Any:
    """The model's own rotary module: it has resolved the config's many ways to say the same."""
    rotary: Any = getattr(served.model.base_model, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if kind not in ROTARY_TYPES:
        raise NotCommon(f"its rotary embedding is of the kind {kind!r}")
    return rotary
