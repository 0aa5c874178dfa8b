"""The header of a GGUF file is read within bounds, and a damaged one is refused."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelRefused
from engine.model.wide import gguf_header
from engine.model.wide.gguf_header import read_header
from engine.model.wide.loader import load_model
from tests.engine.model.gguf_files import tiny_model, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama as Q8_0."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_gguf(tiny_model("llama"), folder / "m.gguf", kind=Type.Q8_0)


def header_bytes(file: Path) -> int:
    return read_header(file).data_start


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_wherever_it_ends(share, tiny, tmp_path):
    content = tiny.read_bytes()
    file = tmp_path / "m.gguf"
    for size in (header_bytes(tiny), len(content)):
        file.write_bytes(content[: math.floor(size * share)])
        with pytest.raises(ModelRefused, match=r"ends inside its header|is truncated|not a GGUF"):
            load_model(file)


def test_a_header_with_any_damaged_byte_is_read_or_refused(tiny, tmp_path):
    content = bytearray(tiny.read_bytes())
    file = tmp_path / "m.gguf"
    rng = np.random.default_rng(7)
    refused = 0
    for _ in range(300):
        at, value = int(rng.integers(header_bytes(tiny))), int(rng.integers(256))
        damaged = content.copy()
        damaged[at] = value
        file.write_bytes(damaged)
        try:
            read_header(file)
        except ModelRefused:
            refused += 1
    assert refused > 20


def lying(num_tensors: int, num_keys: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(rest)


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


HUGE = (1 << 63) - 1
LIES = {
    "tensors": lying(HUGE, 0),
    "keys": lying(0, HUGE),
    "the length of a key": lying(0, 1, struct.pack("<Q", HUGE)),
    "the length of a text": lying(0, 1, key(b"a", 8), struct.pack("<Q", HUGE)),
    "the length of an array": lying(0, 1, key(b"a", 9), struct.pack("<IQ", 8, HUGE)),
    "an array of arrays": lying(0, 1, key(b"a", 9), struct.pack("<IQ", 9, 1)),
    "an unknown type": lying(0, 1, key(b"a", 77)),
    "dimensions": lying(1, 0, struct.pack("<Q", 1), b"t", struct.pack("<I", 1 << 30)),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "another format": b"PK\x03\x04" + bytes(64),
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_costs_nothing_and_is_refused(lie, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(LIES[lie])
    with pytest.raises(ModelRefused):
        load_model(file)


def test_a_long_header_is_refused_at_the_limit(tiny, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ModelRefused, match="more than 0 MiB"):
        read_header(tiny)
