"""Converts a transformers config to the config of the common decoder. Reads no weights.

Llama, Mistral, Mixtral, Qwen 2 to 3.5, SmolLM 3, Phi 3, Granite up to 4, OLMo 2, GPT-OSS, Gemma 1
to 3, LFM2 and others are one architecture with options. Every field of a config must be known here:
with an unknown field or an unexpected value the model is served by the wide path. Nothing is
ignored silently.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from engine.model.decoder.decoder_config import (
    Activation,
    ClampedSwiglu,
    DecoderConfig,
    Experts,
    NotSupported,
    Recurrence,
    Rotary,
)
from engine.model.decoder.families import FAMILIES, Family, Mixer
from engine.model.wide.transformers_model import TransformersModel

#: Rotary types whose frequencies depend neither on the position nor on the sequence length.
ROTARY_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

#: The activations of gates, by their names in transformers.
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
#: The types of layers that have a state instead of attention, by their names in a config.
RECURRENT = frozenset({"conv", "linear_attention"})

#: The fields with the sizes of a recurrence, in the order of `Recurrence`. The activation of the
#: gates is also that of the convolutions before these, for which the kernels have SiLU alone.
RECURRENCES: Mapping[Mixer, Sequence[str]] = {
    "state_space": ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head"),
    "delta_net": (
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ),
}
#: The fields with the number of a convolution's taps.
TAPS = ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv")

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
        "norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "rope_parameters",
        "no_rope_layers",
        "no_rope_layer_interval",
        "layer_rope_theta",
        "hidden_act",
        "hidden_activation",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        # The probe has found the windows from the attention masks, and the caps of the scores from
        # the calls. It refuses attention that is not causal.
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "_sliding_window_pattern",
        "attn_logit_softcapping",
        "use_bidirectional_attention",
        # The sizes of the gates are those of their tensors. Biases are found by their names.
        "block_multiple_of",
        "block_ffn_dim_multiplier",
        "block_auto_adjust_ff_dim",
        "conv_bias",
        "full_attn_idxs",
        "mamba_expand",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_proj_bias",
        "position_embedding_type",
        "shared_intermediate_size",
        # The tensors show which layers have experts.
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "swiglu_alpha",
        "swiglu_limit",
        *TAPS,
        *chain.from_iterable(RECURRENCES.values()),
    }
)
#: Fields with the only value that `DecoderConfig` can describe.
_EXPECTED: dict[str, object] = {
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "time_step_limit": [0.0, math.inf],
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
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "_name_or_path",
    }
)


def read_config(served: TransformersModel) -> DecoderConfig:
    """The config of a model that the wide path serves.

    Raises:
        NotSupported: it has an option that `DecoderConfig` cannot describe.
    """
    # A multimodal checkpoint is served for its text model alone, whose config and module are used.
    config = served.model.config.get_text_config()
    fields = _checked_fields(config)
    if not served.layers:
        raise NotSupported("no layer of it attends")
    (shape,) = set(served.layer_shapes) if len(set(served.layer_shapes)) == 1 else (None,)
    if shape is None or shape.key_dim != shape.value_dim:
        raise NotSupported("its layers have keys and values of different shapes")
    scalings = {float(layer.module.scaling) for layer in served.layers}  # type: ignore[arg-type]
    caps_and_sinks = {(layer.softcap, layer.has_sinks) for layer in served.layers}
    if len(scalings) != 1 or len(caps_and_sinks) != 1:
        raise NotSupported("its layers scale or cap their scores differently, or some have sinks")
    softcap, has_sinks = caps_and_sinks.pop()
    mixers = _mixers(served, fields)
    rotaries, rotary_of = _rotaries(served, fields, len(mixers))
    windows = iter([layer.sliding_window for layer in served.layers])
    return DecoderConfig(
        family=FAMILIES[config.model_type],
        name=_name_of(served.model, _decoder_of(served)),
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(served, fields),
        num_heads=config.num_attention_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.key_dim,
        vocab_size=served.vocab_size,
        epsilon=fields["rms_norm_eps" if "rms_norm_eps" in fields else "norm_eps"],
        experts=_experts(fields, FAMILIES[config.model_type]),
        activation=ACTIVATIONS[_activation_of(fields)[1]],
        swiglu=_swiglu(fields),
        scaling=scalings.pop(),
        softcap=softcap,
        has_sinks=has_sinks,
        rotaries=rotaries,
        mixers=mixers,
        rotary_of=rotary_of,
        windows=tuple(next(windows) if mixer == "attention" else None for mixer in mixers),
        num_taps=next((fields[name] for name in TAPS if name in fields), 0),
        recurrence=_recurrence(mixers, fields),
        embedding_multiplier=_embedding_multiplier(served, fields),
        residual_multiplier=float(fields.get("residual_multiplier", 1.0)),
        logits_divisor=float(fields.get("logits_scaling", 1.0)),
        logits_softcap=fields.get("final_logit_softcapping"),
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
    fields = {name: value for name, value in values.items() if name in own}
    name, activation = _activation_of(fields)
    if activation not in ACTIVATIONS:
        raise NotSupported(f"its config has {name} = {activation!r}")
    return fields


def _decoder_of(served: TransformersModel) -> nn.Module:
    """The module with the layers."""
    model: Any = served.model
    decoder: nn.Module = model.get_decoder()
    return decoder


def _name_of(model: nn.Module, part: nn.Module) -> str:
    names = {module: name for name, module in model.named_modules()}
    return str(names[part])


def _activation_of(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the value of the field with the activation of the gates."""
    name = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    # The code of LFM2 names it instead of its config.
    return name, fields.get(name, "silu")


def _mixers(served: TransformersModel, fields: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """The mixer of each layer."""
    attention: Mixer = "attention"
    if not served.state_shapes:
        return (attention,) * len(served.layers)
    recurrent = FAMILIES[fields["model_type"]].recurrent
    assert recurrent is not None, "a family with a state has a mixer with one"
    return tuple(recurrent if kind in RECURRENT else attention for kind in fields["layer_types"])


def _recurrence(mixers: Sequence[Mixer], fields: Mapping[str, Any]) -> Recurrence | None:
    for mixer, names in RECURRENCES.items():
        if mixer in mixers:
            name, activation = _activation_of(fields)
            if activation != "silu":
                raise NotSupported(f"its config has {name} = {activation!r}, also for convolutions")
            return Recurrence(*(fields[size] for size in names))
    return None


def _intermediate_size(served: TransformersModel, fields: Mapping[str, Any]) -> int:
    """The number of gates. LFM2 computes it from several fields."""
    if "block_auto_adjust_ff_dim" not in fields:
        return int(fields.get("shared_intermediate_size", fields["intermediate_size"]))
    decoder: Any = _decoder_of(served)
    return int(decoder.layers[0].feed_forward.w1.out_features)


def _swiglu(fields: Mapping[str, Any]) -> ClampedSwiglu | None:
    if "swiglu_alpha" not in fields:
        return None
    return ClampedSwiglu(float(fields["swiglu_alpha"]), float(fields["swiglu_limit"]))


def _experts(fields: Mapping[str, Any], family: Family) -> Experts | None:
    count = fields.get("num_local_experts", fields.get("num_experts"))
    if not count:
        return None
    return Experts(
        num_experts=count,
        num_chosen=fields["num_experts_per_tok"],
        size=fields.get("moe_intermediate_size", fields["intermediate_size"]),
        normalizes=fields.get("norm_topk_prob", family.normalizes_experts),
    )


def _embedding_multiplier(served: TransformersModel, fields: Mapping[str, Any]) -> float:
    """The factor of the embeddings, rounded to their type as the model's own module rounds it."""
    embedding: Any = served.model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return float(fields.get("embedding_multiplier", 1.0))
    return float(scale.to(embedding.weight.dtype))


def _rotaries(
    served: TransformersModel, fields: Mapping[str, Any], num_layers: int
) -> tuple[tuple[Rotary, ...], tuple[int | None, ...]]:
    """The model's rotary embeddings, and the index of the one that each layer uses.

    They are read from the model's own module, which has resolved the config's several notations. A
    module with several embeddings has one for each type of layer; Granite SWA has one module for
    each base of the frequencies.
    """
    if "layer_rope_theta" in fields:
        return _rotaries_of_bases(_decoder_of(served), fields["layer_rope_theta"])
    module: Any = _decoder_of(served).rotary_emb
    if module is None:
        return (), (None,) * num_layers
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        names = list(kinds)
        rotaries = tuple(_rotary(module, kinds[name], f"{name}_") for name in names)
        rotary_of = [names.index(name) for name in fields["layer_types"]]
    else:
        rotaries, rotary_of = (_rotary(module, kinds, ""),), [0] * num_layers
    if len({len(rotary.inverse_frequencies) for rotary in rotaries}) != 1:
        raise NotSupported("its layers rotate different numbers of dimensions")
    rotates = fields.get("no_rope_layers") or [True] * num_layers
    return rotaries, tuple(
        index if rotated else None for index, rotated in zip(rotary_of, rotates, strict=True)
    )


def _rotaries_of_bases(
    decoder: Any, bases: Sequence[float]
) -> tuple[tuple[Rotary, ...], tuple[int | None, ...]]:
    """The same for layers with a base each; a layer with the base 0 rotates nothing."""
    modules = [*decoder.rotary_embs] or [decoder.rotary_emb]
    known = [module.config.rope_parameters["rope_theta"] for module in modules]
    return (
        tuple(_rotary(module, module.rope_type, "") for module in modules),
        tuple(known.index(base) if base else None for base in bases),
    )


def _rotary(module: Any, kind: object, prefix: str) -> Rotary:
    if kind not in ROTARY_TYPES:
        raise NotSupported(f"its rotary embedding has the type {kind!r}")
    frequencies = getattr(module, f"{prefix}inv_freq").detach().float().cpu()
    return Rotary(frequencies, float(getattr(module, f"{prefix}attention_scaling")))
