"""Writes tiny models as GGUF files as llama.cpp's converter does, with the library gguf.

The expected weights are computed here from what was written, not by the reader under test.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.wide.loader import LoadedModel, load_model
from engine.model.wide.stored_layers import dequantize

#: 256 bytes, a few merged pieces, and three control tokens.
PIECES = ["th", "in", "Ġt", "Ġth"]
MERGES = ["t h", "i n", "Ġ t", "Ġ th"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL, *bytes_to_unicode().values(), *PIECES]
END = TOKENS.index("<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)

#: The bytes of a block where its scales in float16 begin, with values that give
#: weights of mean zero.
_K_SCALES = {
    Type.Q4_K: {0: 5e-4, 2: 3.75e-3},
    Type.Q5_K: {0: 2.5e-4, 2: 3.875e-3},
    Type.Q6_K: {208: 1e-4},
}

#: Keys of some types, and their names in the configuration.
FURTHER_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}

_SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": END,
    "bos_token_id": 1,
}
#: The scaling of Llama 3.1.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Types whose files have queries and keys in the order of another rotation.
PAIRED = ("llama", "smollm3", "granite")
CONFIGS = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "llama tied": transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama scaled": transformers.LlamaConfig(**_SIZES, rope_parameters=LLAMA3),
    "qwen2": transformers.Qwen2Config(**_SIZES),
    # The reader takes the size of a head from the family's default.
    "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=128),
    "smollm3": transformers.SmolLM3Config(
        **(_SIZES | {"num_hidden_layers": 5}), pad_token_id=None, no_rope_layer_interval=4
    ),
    "granite": transformers.GraniteConfig(
        **_SIZES,
        attention_multiplier=0.125,
        embedding_multiplier=1.5,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "qwen3moe": transformers.Qwen3MoeConfig(
        **_SIZES,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "qwen2moe": transformers.Qwen2MoeConfig(
        **_SIZES,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **(_SIZES | {"num_hidden_layers": 3, "intermediate_size": 64, "pad_token_id": None}),
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=13,
    ),
    "phi3": transformers.Phi3Config(
        **_SIZES, pad_token_id=None, sliding_window=29, original_max_position_embeddings=256
    ),
    # Every second layer has a window.
    "gemma2": transformers.Gemma2Config(
        **(_SIZES | {"num_hidden_layers": 3}),
        sliding_window=13,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    # Five layers with a window that is shorter than most prompts, and one without. The sizes are
    # multiples of the blocks of K-quants.
    "gemma3": transformers.Gemma3TextConfig(
        **(_SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6}),
        sliding_window=13,
    ),
}


def tiny_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = CONFIGS[name]
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("bias"):
                # Biases and norms that are all equal would hide one that is lost.
                offset = 0.0 if parameter_name.endswith("bias") else 1.0
                parameter.copy_(offset + 0.1 * torch.randn_like(parameter))
    return model


def load_dequantized(file: Path, **options) -> LoadedModel:
    """The model of a file, with ordinary layers."""
    loaded = load_model(file, **options)
    dequantize(loaded.model)
    return loaded


def write_gguf(
    model: PreTrainedModel,
    file: Path,
    *,
    kind: Type = Type.F32,
    kinds: Mapping[str, Type] | None = None,
    more: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
    tensors_in_a_part: int = 0,
) -> Path:
    """Write the model, and set its weights to what a reader must get from the file.

    With `tensors_in_a_part` it is split, and the path is that of the first part.

    Args:
        kind: the type of the matrices; vectors are float32.
        kinds: the type of some matrices, by a part of their names, such as "attn_v".
        more: metadata that replaces or completes the usual keys.
        without: keys of metadata and names of tensors that are left out.
    """
    config = model.config
    architecture = architecture or architecture_of(config)
    writer = gguf.GGUFWriter(str(file), architecture, split_max_tensors=tensors_in_a_part)
    metadata = _metadata(config, architecture) | _tokenizer(config.eos_token_id) | dict(more or {})
    for key, value in metadata.items():
        if key not in without and key != "general.architecture":
            _add(writer, key, value)
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture_of(config)],
        config.num_hidden_layers,
    )
    with torch.no_grad():
        for name, parameter in _written_apart(model):
            written = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert written is not None, name
            values = parameter.detach().contiguous().numpy()
            if parameter.dim() > 1 and not name.endswith("bias"):
                own = [other for part, other in (kinds or {}).items() if f"{part}." in written]
                chosen = own[0] if own else kind
                stored = _quantized(values, chosen)
                read = gguf.quants.dequantize(stored, chosen)
                parameter.copy_(torch.from_numpy(np.array(read, dtype=np.float32)))
                stored = _permuted(stored, written, config)
                if written not in without:
                    writer.add_tensor(written, stored, raw_dtype=chosen)
            elif written not in without:
                if config.model_type.startswith("gemma"):
                    # Its norms scale by one more than what transformers stores.
                    values = values + 1
                    parameter.copy_(torch.from_numpy(values - 1))
                writer.add_tensor(written, values)
    for name, values in (_divisors(config) | dict(extra_tensors or {})).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(file)[0]


def architecture_of(config: Any) -> str:
    """The name of a model's type in GGUF files."""
    name = str(config.model_type).removesuffix("_text").replace("_moe", "moe")
    return name.replace("gpt_oss", "gpt-oss")


def _written_apart(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, with the gates and ups of experts as the two tensors that a file has."""
    is_transposed = model.config.model_type == "gpt_oss"
    for name, parameter in model.named_parameters():
        if is_transposed and "experts." in name:
            yield from _written_transposed(name, parameter)
        elif name.endswith("self_attn.sinks"):
            yield f"{name}.weight", parameter
        elif name.endswith("experts.gate_up_proj"):
            for part, values in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", values
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", parameter
        elif name.endswith("shared_expert_gate.weight"):
            yield name, parameter[0]
        else:
            yield name, parameter


def _written_transposed(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of experts that have their inputs first, and gates and ups in turns."""
    stem, _, part = name.rpartition(".")
    suffix = "bias" if part.endswith("_bias") else "weight"
    whole = parameter if suffix == "bias" else parameter.mT
    if part.startswith("down"):
        yield f"{stem}.down_proj.{suffix}", whole
        return
    for first, own in enumerate(("gate", "up")):
        half = parameter[..., first::2]
        yield f"{stem}.{own}_proj.{suffix}", half if suffix == "bias" else half.mT


def _quantized(values: np.ndarray, kind: Type) -> np.ndarray:
    """The blocks of a matrix; for K-quants, which the library only reads, blocks at random."""
    scales = _K_SCALES.get(kind)
    if scales is None:
        return gguf.quants.quantize(values, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    shape = (values.shape[0], values.shape[1] // elements, size)
    blocks = rng.integers(256, size=shape, dtype=np.uint8)
    for offset, scale in scales.items():
        blocks[..., offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def _divisors(config: Any) -> dict[str, np.ndarray]:
    """What llama.cpp's converter stores of scaled frequencies: the unscaled ones over them."""
    if config.rope_parameters.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = config.hidden_size // config.num_attention_heads
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, size, 2) / size)
    return {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}


def _permuted(rows: np.ndarray, name: str, config: Any) -> np.ndarray:
    """The rows of a query or key projection in the order of llama.cpp's rotary embedding."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type not in PAIRED or part not in heads:
        return rows
    shape = (heads[part], 2, rows.shape[0] // heads[part] // 2, *rows.shape[1:])
    return np.ascontiguousarray(rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape))


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or 16
    own = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters.get("rope_theta", 1000000.0)),
        "rope.dimension_count": head_dim,
    }
    if config.model_type.startswith("gemma"):
        # Llama.cpp's converter writes these where a head is not a share of the hidden size.
        del own["rope.dimension_count"]
        own["attention.key_length"] = own["attention.value_length"] = head_dim
    if config.model_type == "gpt_oss":
        own |= {
            "rope.scaling.type": config.rope_parameters["rope_type"],
            "rope.scaling.factor": float(config.rope_parameters["factor"]),
            "rope.scaling.original_context_length": 4096,
            "expert_feed_forward_length": config.intermediate_size,
        }
    own |= {
        key: getattr(config, name)
        for key, name in FURTHER_KEYS.items()
        if getattr(config, name, None)
    }
    return {"general.name": "tiny"} | {f"{architecture}.{key}": own[key] for key in own}


def _tokenizer(eos_token_id: int) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int) and not 0 <= value < 1 << 32:
        writer.add_int64(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
