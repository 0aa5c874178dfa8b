"""The quantized blocks of GGUF files: where a model's weights are in the file, and what they hold.

The layout of blocks is that of ggml: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.model.kernels.quantized import QuantizedWeight
from engine.model.wide.gguf_header import GgufHeader, TensorEntry

#: The names of a layer's matrices in transformers.
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A weight as a GGUF file stores it.

    Args:
        kind: ggml's name of the type, a key of `KINDS`.
        blocks: [outputs, bytes], uint8.
    """

    kind: str
    blocks: torch.Tensor

    def unpacked(self) -> QuantizedWeight:
        return KINDS[self.kind](self.blocks)


def _halves(blocks: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """[outputs, blocks]: the float16 at byte `first` of each block of `size` bytes."""
    split = blocks.view(len(blocks), -1, size)[..., first : first + 2]
    return split.contiguous().view(torch.float16)[..., 0]


def _bytes(blocks: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """[outputs, blocks, bytes]: what is in each block from byte `first` on."""
    return blocks.view(len(blocks), -1, size)[..., first:]


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    """The low halves of the bytes of a block, then the high ones."""
    return torch.cat((values & 15, values >> 4), dim=-1)


def _split(values: torch.Tensor, size: int) -> torch.Tensor:
    """The last dimension in parts of `size`."""
    return values.reshape(*values.shape[:-1], -1, size)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    # Adding 128 modulo 256 turns signed bytes into numbers.
    numbers = _bytes(blocks, 34, 2) ^ 128
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 34, 0), None, 8)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _half_bytes(_bytes(blocks, 18, 2))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 18, 0), None, 4)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _half_bytes(_bytes(blocks, 20, 4))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 20, 0), _halves(blocks, 20, 2), 4)


def _with_fifth_bits(values: torch.Tensor) -> torch.Tensor:
    """Numbers of 5 bits: their fifth bits are in four bytes before the others."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (values[..., :4, None] >> places & 1).flatten(-2)
    return _half_bytes(values[..., 4:]) | fifth << 4


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _with_fifth_bits(_bytes(blocks, 22, 2))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 22, 0), None, 5)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _with_fifth_bits(_bytes(blocks, 24, 4))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 24, 0), _halves(blocks, 24, 2), 5)


def _nested(blocks: torch.Tensor, size: int, numbers: torch.Tensor, bits: int) -> QuantizedWeight:
    """Blocks of 256 that begin with two factors, and eight scales and minima of 6 bits."""
    values = _bytes(blocks, size, 4)
    scales, minima, rest = values[..., :4], values[..., 4:8], values[..., 8:12]
    scales = torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), dim=-1)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), dim=-1)
    return QuantizedWeight(
        numbers=numbers.flatten(1),
        scales=scales.view(torch.int8).flatten(1),
        minima=minima.view(torch.int8).flatten(1),
        bits=bits,
        scale_factors=_halves(blocks, size, 0),
        # Minima are subtracted in such a block.
        minimum_factors=-_halves(blocks, size, 2),
    )


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _half_bytes(_split(_bytes(blocks, 144, 16), 32))
    return _nested(blocks, 144, numbers, 4)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    low = _half_bytes(_split(_bytes(blocks, 176, 48), 32)).flatten(-2)
    # A byte has the fifth bits of its place in all eight groups.
    fifth = _bytes(blocks, 176, 16)[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return _nested(blocks, 176, low | (fifth & 1).flatten(-2) << 4, 5)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    values = _bytes(blocks, 210, 0)
    low = _half_bytes(_split(values[..., :128], 64))
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = _split(values[..., 128:192], 32)[..., None, :] >> places & 3
    return QuantizedWeight(
        numbers=(low | high.flatten(-2) << 4).flatten(1),
        scales=values[..., 192:208].view(torch.int8).flatten(1),
        minima=None,
        bits=6,
        scale_factors=_halves(blocks, 210, 208),
    )


#: The types that are kept as stored, by ggml's name.
KINDS: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def stored_blocks(
    header: GgufHeader, file: Path, model: PreTrainedModel
) -> Mapping[str, StoredBlocks]:
    """The blocks of each weight whose type is in `KINDS`, by its name in the model's state dict.

    They are views of the mapped file, which nothing reads before they are unpacked.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    data = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))
    found: dict[str, StoredBlocks] = {}
    for tensor in header.tensors:
        kind = GGMLQuantizationType(tensor.ggml_type)
        if kind.name not in KINDS or len(tensor.shape) != 2:
            continue
        elements, size = GGML_QUANT_SIZES[kind]
        rows, row_bytes = tensor.shape[1], tensor.shape[0] // elements * size
        begin = header.data_start + tensor.offset
        blocks = data[begin : begin + rows * row_bytes].view(rows, row_bytes)
        found[_name_of(tensor)] = StoredBlocks(kind.name, _in_order(blocks, tensor, model))
    if _HEAD not in found and model.config.tie_word_embeddings and _EMBEDDING in found:
        found[_HEAD] = found[_EMBEDDING]
    return MappingProxyType(found)


def _name_of(tensor: TensorEntry) -> str:
    """The name of a matrix in a model's state dict; the loader knows all tensors of the file."""
    if tensor.name == "token_embd.weight":
        return _EMBEDDING
    if tensor.name == "output.weight":
        return _HEAD
    _, layer, name, _ = tensor.name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[name]}.weight"


def _in_order(blocks: torch.Tensor, tensor: TensorEntry, model: PreTrainedModel) -> torch.Tensor:
    """The rows in the model's order: Llama files have those of a head for another rotation."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = tensor.name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return blocks
    pairs = blocks.view(heads[part], -1, 2, blocks.shape[1])
    return pairs.transpose(1, 2).reshape(blocks.shape)
