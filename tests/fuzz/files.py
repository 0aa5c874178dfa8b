"""What reads the files of a model before it is loaded, as functions of bytes alone.

Such a file comes from a stranger as often as a request does. Only its names, sizes and notes are
read here, since the libraries that read the rest trust them.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

from engine.errors import ModelRefused
from engine.model.wide.compressed_tensors import compressed_tensors
from engine.model.wide.config_limits import refuse_limitless
from engine.model.wide.gguf_header import MAX_ARRAY_LENGTH, check_extents, read_header
from engine.model.wide.gptq_and_awq import awq, gptq
from engine.model.wide.stored_tensors import WEIGHTS, by_name, stored_tensors

#: Elements and bytes of a block, by a type of the seed.
_BLOCKS = {0: (1, 4), 8: (32, 34)}


@contextlib.contextmanager
def file_of(data: bytes):
    """The path of a file with these bytes, in memory."""
    handle = os.memfd_create("fuzz")
    try:
        os.write(handle, data)
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def gguf_header(data: bytes) -> None:
    """A GGUF file: what it lists is in the file, or ModelRefused."""
    with file_of(data) as file, contextlib.suppress(ModelRefused):
        header = read_header(file)
        assert sum(header.lengths.values()) <= MAX_ARRAY_LENGTH
        if all(tensor.ggml_type in _BLOCKS for tensor in header.tensors):
            check_extents(header, file, _BLOCKS)
            assert sum(prod(tensor.shape) for tensor in header.tensors) <= len(data)


def weights_header(data: bytes) -> None:
    """A safetensors file: names, types and shapes of its tensors, or ModelRefused."""
    with file_of(data) as file, contextlib.suppress(ModelRefused):
        tensors = by_name(stored_tensors(lambda name: file if name == WEIGHTS else None))
        assert all(prod(tensor.shape) < 1 << 63 for tensor in tensors.values())


def quantization_note(data: bytes) -> None:
    """A note of config.json: the format that it describes, or ModelRefused."""
    try:
        note = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(note, dict):
        for read in (compressed_tensors, gptq, awq):
            with contextlib.suppress(ModelRefused):
                refuse_limitless(note)
                read(note)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (gguf_header, weights_header, quantization_note)
}


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf() -> bytes:
    """A file with a text, an array of texts, an array of numbers, and two tensors."""
    pairs = [
        _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama"),
        _text(b"llama.block_count") + struct.pack("<II", 4, 2),
        _text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + _text(b"a") + _text(b"bc"),
        _text(b"scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
    ]
    tensors = [
        _text(b"norm") + struct.pack("<IQIQ", 1, 8, 0, 0),
        _text(b"q") + struct.pack("<IQQIQ", 2, 32, 2, 8, 32),
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32) + bytes(32 + 2 * 34)


def _weights() -> bytes:
    tensors = {
        "norm": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "q": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]},
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


_WEIGHTS_OF_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_NOTES = (
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS_OF_GROUP}},
    },
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "a": {"weights": {"num_bits": 8, "type": "float", "block_structure": [32, 48],
                              "strategy": "block"}},
        },
    },
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "gemm"},
)  # fmt: skip
SEEDS: dict[str, list[bytes]] = {
    "gguf_header": [_gguf()],
    "weights_header": [_weights()],
    "quantization_note": [json.dumps(note).encode() for note in _NOTES],
}
