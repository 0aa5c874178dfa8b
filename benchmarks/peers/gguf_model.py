"""Writes a benchmark model as a GGUF file. Needs the `gguf` package of llama.cpp's sources.

Run it with `python -m benchmarks.peers.gguf_model MODEL_FOLDER OUTPUT_FILE bf16|fp32`.
"""

import json
import sys
from pathlib import Path

import numpy as np

#: Our name of a layer's tensor -> its name in GGUF.
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(model: Path, output: Path, dtype: str) -> None:
    """Write the Llama model in a folder as a GGUF file: matrices in `dtype`, norms in float32."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(output, "llama")
    writer.add_name(model.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in read_bfloat16(model / "model.safetensors"):
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        theirs = their_name(name)
        for ours, num_heads in (("q_proj", heads), ("k_proj", config["num_key_value_heads"])):
            if ours in name:
                values = interleave_halves(values, num_heads)
        if values.ndim == 1 or dtype == "fp32":
            writer.add_tensor(theirs, values)
        else:
            stored = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(theirs, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_bfloat16(path: Path):
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


def their_name(name: str) -> str:
    """The name of a tensor in GGUF. KeyError for an unknown one."""
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
    if name in whole:
        return f"{whole[name]}.weight"
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_TENSORS[part.removesuffix('.weight')]}.weight"


def interleave_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the outputs of a projection, because GGUF's rotation pairs neighbours, not halves."""
    halves = values.reshape(num_heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
