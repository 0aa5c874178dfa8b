"""Right before fast: on the device every attention is what the reference attends."""

import pytest
import torch

from engine.model.attention import AUTOMATIC, BACKENDS, DECODES, choose_backend
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.interface import AttentionNeeds, AttentionUnavailable
from engine.model.attention.self_check import (
    CHECKED_DECODES,
    CHECKED_ROWS,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
)

HALVES = [torch.float16, torch.bfloat16]
#: Query heads, key heads, width: groups of 1 to 8, widths that are no powers of two.
SHAPES = [(16, 8, 128), (32, 8, 128), (14, 2, 64), (12, 12, 64), (32, 8, 80), (24, 8, 96)]
WIDE = (8, 1, 256)
#: Chunks and decodes over contexts of many tiles, at and beside their ends.
LONG_ROWS = ((1, 5000), (130, 4096), (1, 1), (64, 64), (1, 257), (333, 700), (1, 4097))
LONG_DECODES = ((1, 9000), (1, 1), (1, 2048), (1, 2049), (1, 64), (1, 65), (1, 4097))


def needs_of(shape, *, has_window=True) -> AttentionNeeds:
    heads, kv_heads, dim = shape
    return AttentionNeeds(
        heads=heads, kv_heads=kv_heads, key_dim=dim, value_dim=dim, has_window=has_window,
        has_softcap=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_served_by_flash_attention(dtype):
    """Whether its pages are read or its keys gathered is for the release of torch to say."""
    backend, block_size = choose_backend(
        "auto", dtype=dtype, device="cuda", block_size=16, needs=needs_of(SHAPES[0])
    )
    print(f"{dtype}: {backend.name}, blocks of {block_size}")
    assert backend.name in ("cuda", "cuda-gathered")
    assert block_size in (16, CudaAttention.block_multiple)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", AUTOMATIC["cuda"][:-1])
def test_a_backend_is_the_reference(name, block_size, shape, dtype):
    try:
        backend = BACKENDS[name]()
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    if block_size % backend.block_multiple and not takes(backend, block_size, shape, dtype):
        pytest.skip(f"{name} does not take blocks of {block_size} tokens")
    for rows in (CHECKED_ROWS, LONG_ROWS, CHECKED_DECODES):
        self_check(
            backend, dtype=dtype, device="cuda", block_size=block_size, needs=needs_of(shape),
            rows=rows,
        )  # fmt: skip


def takes(backend, block_size, shape, dtype) -> bool:
    """Whether a backend refuses a block size; a wrong number is no refusal."""
    try:
        self_check(
            backend, dtype=dtype, device="cuda", block_size=block_size, needs=needs_of(shape)
        )
    except AttentionCheckFailed as reason:
        if "does not work" in str(reason):
            return False
        raise
    return True


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("make", DECODES)
def test_an_attention_of_captured_steps_is_the_reference(make, block_size, shape, dtype):
    try:
        decode = DecodesOnly(make())
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    flash = make is CudaAttention
    if flash and (dtype == torch.float32 or not takes(decode, block_size, shape, dtype)):
        pytest.skip(f"{decode.name} does not take blocks of {block_size} tokens in {dtype}")
    for rows in (CHECKED_DECODES, LONG_DECODES):
        self_check(
            decode, dtype=dtype, device="cuda", block_size=block_size, needs=needs_of(shape),
            rows=rows,
        )  # fmt: skip


def test_in_single_precision_something_serves_too():
    backend, _ = choose_backend(
        "auto", dtype=torch.float32, device="cuda", block_size=16, needs=needs_of(SHAPES[0])
    )
    assert backend.name in ("cpu", "reference")


class OneKeyShort:
    """Forgets the newest key of every context that has more than one."""

    name = "one-key-short"

    def __init__(self, decode) -> None:
        self._decode = decode

    def plan_decodes(self, context_lens, block_tables, *, max_context):
        shorter = (context_lens - 1).clamp(min=1)
        return self._decode.plan_decodes(shorter, block_tables, max_context=max_context)


def test_an_attention_that_forgets_a_key_would_be_seen():
    """The control of all the above, on the device itself."""
    decode = next(DecodesOnly(OneKeyShort(make())) for make in DECODES if available(make))
    with pytest.raises(AttentionCheckFailed, match="is off by"):
        self_check(
            decode, dtype=torch.float16, device="cuda", block_size=256, needs=needs_of(SHAPES[0]),
            rows=CHECKED_DECODES,
        )  # fmt: skip


def available(make) -> bool:
    try:
        make()
    except AttentionUnavailable:
        return False
    return True
