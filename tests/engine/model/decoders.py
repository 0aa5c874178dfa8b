"""Builders of the fast path's tests: a tiny model of every family it knows, and its three forms."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from engine.model.causal_model import CausalModel
from engine.model.checks.probe import probe
from engine.model.checks.rehearsal import reference_rehearsal
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.kernels.build import Variant, best_variant
from engine.model.wide.loader import load_model
from engine.model.wide.transformers_model import TransformersModel
from tests.engine.model.builders import _GROUPED, save_model

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

_GRANITE_4 = {
    "num_local_experts": 0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}

#: One per family, and one per option that a family may have.
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**_GROUPED),
    "llama, tied": transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "llama, biases": transformers.LlamaConfig(**_GROUPED, attention_bias=True),
    "llama, scaled rotary": transformers.LlamaConfig(**_GROUPED, rope_parameters=_LLAMA3),
    "llama, yarn": transformers.LlamaConfig(**_GROUPED, rope_parameters=_YARN),
    "llama, no groups": transformers.LlamaConfig(**(_GROUPED | {"num_key_value_heads": 4})),
    "llama, one key head": transformers.LlamaConfig(**(_GROUPED | {"num_key_value_heads": 1})),
    # Nothing is a multiple of a strip: hidden 72, heads of 18, 50 inner, 211 tokens.
    "llama, odd sizes": transformers.LlamaConfig(
        **(_GROUPED | {"hidden_size": 72, "intermediate_size": 50}), head_dim=18
    ),
    "llama, wide heads": transformers.LlamaConfig(**_GROUPED, head_dim=128),
    "mistral, window": transformers.MistralConfig(**_GROUPED, sliding_window=13),
    "qwen2": transformers.Qwen2Config(**_GROUPED),
    "qwen3": transformers.Qwen3Config(**_GROUPED, head_dim=16),
    "qwen3, window in some layers": transformers.Qwen3Config(
        **_GROUPED, head_dim=16, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "smollm3": transformers.SmolLM3Config(**(_GROUPED | {"num_hidden_layers": 5})),
    "phi3": transformers.Phi3Config(
        **_GROUPED,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "granite": transformers.GraniteConfig(
        **_GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
        logits_scaling=4.0,
    ),
    # Two bases of rotary frequencies, and a layer without any. The first layer has no window.
    "granite_swa": transformers.GraniteSWAConfig(
        **(_GROUPED | {"num_hidden_layers": 3}),
        layer_rope_theta=[10000.0, 0, 500.0],
        sliding_window=13,
        attention_multiplier=0.25,
        residual_multiplier=0.5,
    ),
    "granite_swa, no positions": transformers.GraniteSWAConfig(
        **_GROUPED, layer_rope_theta=[0, 0], sliding_window=13, attention_multiplier=0.25
    ),
    "olmo2": transformers.Olmo2Config(**_GROUPED),
    "mixtral": transformers.MixtralConfig(
        **_GROUPED, num_local_experts=5, num_experts_per_tok=2, sliding_window=11
    ),
    # More experts than lanes, whose weights do not add up to one; the first layer has none.
    "qwen3, experts": transformers.Qwen3MoeConfig(
        **(_GROUPED | {"num_hidden_layers": 3}),
        head_dim=16,
        num_experts=19,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
    ),
    "qwen3, normalized experts": transformers.Qwen3MoeConfig(
        **_GROUPED,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    ),
    # Sinks, experts with biases, gates that are limited where they would often go further.
    "gpt_oss": transformers.GptOssConfig(
        **_GROUPED,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=13,
        swiglu_limit=1.5,
        rope_parameters=_YARN | {"truncate": False},
    ),
    "lfm2": transformers.Lfm2Config(
        **(_GROUPED | {"num_hidden_layers": 4, "intermediate_size": 100}),
        block_multiple_of=32,
        layer_types=["conv", "full_attention", "full_attention", "conv"],
    ),
    # Nothing is a multiple of a strip: 72 channels, 50 gates.
    "lfm2, biases and odd sizes": transformers.Lfm2Config(
        **(_GROUPED | {"hidden_size": 72, "intermediate_size": 50, "num_hidden_layers": 3}),
        layer_types=["conv", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        conv_L_cache=5,
    ),
    # The first and the last layer are delta nets, in which a key head serves two heads.
    "qwen3.5": transformers.Qwen3_5TextConfig(
        **(_GROUPED | {"num_hidden_layers": 4}),
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention", "full_attention", "linear_attention"],
    ),
    # Nothing is a multiple of a strip, and a rotation has six of 18 dimensions.
    "qwen3.5, biases and odd sizes": transformers.Qwen3_5TextConfig(
        **(_GROUPED | {"hidden_size": 72, "intermediate_size": 50, "num_hidden_layers": 3}),
        head_dim=18,
        attention_bias=True,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=9,
        linear_value_head_dim=22,
        linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.34,
        },
    ),
    "qwen3.5, attention only": transformers.Qwen3_5TextConfig(
        **_GROUPED, head_dim=16, layer_types=["full_attention"] * 2
    ),
    # State spaces, of which the second and the last layer have none, and no rotation.
    "granite 4": transformers.GraniteMoeHybridConfig(
        **(_GROUPED | {"num_hidden_layers": 4}),
        **_GRANITE_4,
        shared_intermediate_size=96,
        mamba_n_heads=4,
        mamba_d_state=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    ),
    # Nothing is a multiple of a strip: eight heads of 18 in two groups, which are normed apart.
    "granite 4, groups and odd sizes": transformers.GraniteMoeHybridConfig(
        **(_GROUPED | {"hidden_size": 72, "num_hidden_layers": 3}),
        **_GRANITE_4,
        shared_intermediate_size=50,
        attention_bias=True,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=9,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
    ),
    # Experts, and an MLP beside them.
    "granite 4, experts": transformers.GraniteMoeHybridConfig(
        **(_GROUPED | {"num_hidden_layers": 3, "intermediate_size": 24}),
        **(_GRANITE_4 | {"num_local_experts": 5, "num_experts_per_tok": 2}),
        shared_intermediate_size=40,
        mamba_n_heads=4,
        mamba_d_state=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "granite 4, attention only": transformers.GraniteMoeHybridConfig(
        **_GROUPED, **_GRANITE_4, shared_intermediate_size=32, layer_types=["full_attention"] * 2
    ),
    "gemma": transformers.GemmaConfig(**_GROUPED, head_dim=16),
    # Scores and logits capped where they would often go further, and a window in every other layer.
    "gemma2": transformers.Gemma2Config(
        **_GROUPED,
        head_dim=16,
        sliding_window=13,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=5.0,
    ),
    # Two rotary embeddings, one of them scaled, and a window in two of three layers.
    "gemma3": transformers.Gemma3TextConfig(
        **(_GROUPED | {"num_hidden_layers": 4}),
        head_dim=32,
        sliding_window=13,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
}


@dataclass(frozen=True)
class Forms:
    """One model in all its forms."""

    wide: TransformersModel
    torch: Decoder
    native: NativeDecoder


def forms_of(
    config: PreTrainedConfig, folder: Path, *, dtype: str, variant: Variant | None = None
) -> Forms:
    """A model with random weights and random norms and biases, which start as ones and zeros."""
    save_model(config, folder)
    loaded = load_model(folder, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in loaded.model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    wide = probe(loaded.model, max_model_len=loaded.max_model_len)
    description = read_config(wide)
    weights = read_weights(description, loaded.model.state_dict())
    return Forms(
        wide,
        Decoder(description, weights),
        NativeDecoder(description, weights, variant=variant or best_variant()),
    )


_shared: dict[tuple[str, str, Variant], Forms] = {}


def shared_forms(config: PreTrainedConfig, *, dtype: str, variant: Variant | None = None) -> Forms:
    """As `forms_of`, but built once in a process: no test may change them.

    To build and probe a model takes several times as long as most tests of it.
    """
    key = config.to_json_string(use_diff=False), dtype, variant or best_variant()
    if key not in _shared:
        with tempfile.TemporaryDirectory() as folder:
            _shared[key] = forms_of(config, Path(folder), dtype=dtype, variant=variant)
    return _shared[key]


def run_steps(
    model: CausalModel,
    prompts: list[list[int]],
    steps: list[list[int]],
    *,
    dtype: torch.dtype,
    block_size: int = 16,
    adapters: Sequence[str | None] = (None,),
) -> list[torch.Tensor]:
    """Logits of every token of every prompt; a step computes so many tokens of each prompt."""
    rehearsal = reference_rehearsal(dtype=dtype, device=torch.device("cpu"), block_size=block_size)
    return rehearsal.logits(model, prompts, steps, adapters=adapters)
