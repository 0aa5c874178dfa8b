"""Writes a benchmark model as a GGUF file. Needs the `gguf` package of llama.cpp's sources.

Run it with `python -m benchmarks.peers.gguf_model MODEL_FOLDER OUTPUT_FILE bf16|fp32`.

That package knows the names of tensors in GGUF. What llama.cpp stores in another form than
transformers is here, by type of model (`FAMILIES`).
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
#: Pairs of a tensor's name in transformers and its values.
Tensors = Iterator[tuple[str, np.ndarray]]

#: Kernels of convolutions.
KERNELS = (".conv.conv.weight", ".conv1d.weight")
#: What llama.cpp reads only in float32, also where it has two dimensions.
IN_FLOAT32 = (*KERNELS, "norm.weight")


@dataclass(frozen=True)
class Family:
    """How llama.cpp stores the models of one type.

    `add_keys` adds the metadata that other families lack. `stored` turns one tensor into those of
    the file, named so that `gguf` knows them.
    """

    architecture: str
    add_keys: Callable[[Any, Config], None]
    stored: Callable[[str, np.ndarray, Config], Tensors]


def convert(model: Path, output: Path, dtype: str) -> None:
    """Write the model in a folder as a GGUF file: matrices in `dtype`, the rest in float32."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(output, family.architecture)
    add_common_keys(writer, config)
    family.add_keys(writer, config)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architectures[family.architecture], config["num_hidden_layers"]
    )
    for name, bits in read_bfloat16(model / "model.safetensors"):
        whole = (bits.astype(np.uint32) << 16).view(np.float32)
        for part, values in family.stored(name, whole, config):
            theirs = names.get_name(part, try_suffixes=(".weight", ".bias"))
            if theirs is None:
                raise KeyError(part)
            is_matrix = values.ndim > 1 and part.endswith(".weight")
            if dtype == "bf16" and is_matrix and not part.endswith(IN_FLOAT32):
                stored = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
                writer.add_tensor(theirs, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(theirs, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_common_keys(writer: Any, config: Config) -> None:
    """The metadata of all families."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rotation = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rotation.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rotation["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def kv_heads_by_layer(config: Config) -> list[int]:
    """The heads of keys of each layer: some architectures say so which layers have no attention."""
    kv_heads = config["num_key_value_heads"]
    return [kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]]


def read_bfloat16(path: Path) -> Tensors:
    """Yields name and bit pattern of each tensor in a safetensors file with bfloat16 only."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", name
        begin, end = entry["data_offsets"]
        data = content[8 + length + begin : 8 + length + end]
        yield name, np.frombuffer(data, dtype=np.uint16).reshape(entry["shape"])


def add_llama_keys(writer: Any, config: Config) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])


def llama_tensors(name: str, values: np.ndarray, config: Config) -> Tensors:
    if "q_proj" in name:
        values = interleave_halves(values, config["num_attention_heads"])
    elif "k_proj" in name:
        values = interleave_halves(values, config["num_key_value_heads"])
    yield name, values


def interleave_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the outputs of a projection, because GGUF's rotation pairs neighbours, not halves."""
    halves = values.reshape(num_heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def add_lfm2_keys(writer: Any, config: Config) -> None:
    assert not config["block_auto_adjust_ff_dim"]
    writer.add_head_count_kv(kv_heads_by_layer(config))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def lfm2_tensors(name: str, values: np.ndarray, _: Config) -> Tensors:
    yield name, values.squeeze(1) if name.endswith(KERNELS) else values


def add_granite_keys(writer: Any, config: Config) -> None:
    assert not config["num_local_experts"] and config["position_embedding_type"] != "rope"
    writer.add_head_count_kv(kv_heads_by_layer(config))
    writer.add_feed_forward_length(config["shared_intermediate_size"])
    # llama.cpp takes this as the switch for rotations, which this family does without.
    writer.add_rope_scaling_finetuned(value=False)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def granite_tensors(name: str, values: np.ndarray, config: Config) -> Tensors:
    """The names of a layer without experts are those of an ordinary one."""
    if name.endswith("shared_mlp.input_linear.weight"):
        for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2), strict=True):
            yield name.replace("shared_mlp.input_linear", f"mlp.{part}"), half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), values
    elif name.endswith("mamba.D"):
        yield name, values[:, None]
    elif name.endswith("mamba.norm.weight"):
        yield name, values.reshape(config["mamba_n_groups"], -1)
    else:
        for part, stored in _state_tensors(name, values):
            yield part, stored[:, None] if part.endswith("A_log") else stored


def add_qwen35_keys(writer: Any, config: Config) -> None:
    assert config["linear_num_key_heads"] == config["linear_num_value_heads"]
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"]
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    interval = 1 + config["layer_types"].index("full_attention")
    assert all(
        (kind == "full_attention") == (number % interval == 0)
        for number, kind in enumerate(config["layer_types"], start=1)
    )
    writer.add_full_attention_interval(interval)
    # The pairs of a rotation belong to three axes in turn. In a text all have the same position.
    rotated = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    by_axis = [len(range(axis, rotated // 2, 3)) for axis in range(3)]
    writer.add_rope_dimension_sections([*by_axis, 0])


def qwen35_tensors(name: str, values: np.ndarray, _: Config) -> Tensors:
    """Norms scale by one more than what transformers stores, but for those of delta nets."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + np.float32(1.0)
    yield from _state_tensors(name, values)


def _state_tensors(name: str, values: np.ndarray) -> Tensors:
    """The decays and kernels of state spaces and delta nets."""
    if name.endswith(".A_log"):
        values = -np.exp(values)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith(KERNELS):
        values = values.squeeze(1)
    yield name, values


#: Type of a model in transformers -> how llama.cpp stores it.
FAMILIES = {
    "llama": Family("llama", add_llama_keys, llama_tensors),
    "lfm2": Family("lfm2", add_lfm2_keys, lfm2_tensors),
    "granitemoehybrid": Family("granitehybrid", add_granite_keys, granite_tensors),
    "qwen3_5_text": Family("qwen35", add_qwen35_keys, qwen35_tensors),
}


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
