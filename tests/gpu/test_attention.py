"""Right before fast: on the device every attention is what the reference attends."""

import numpy as np
import pytest
import torch

from engine.batch import BlockCopy
from engine.model.attention import AUTOMATIC, BACKENDS, DECODES, choose_backend
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.interface import AttentionMetadata, AttentionNeeds, AttentionUnavailable
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    CHECKED_DECODES,
    CHECKED_ROWS,
    TOLERANCES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
    worst_error,
)
from engine.model.device.kv_pool import KVPool, LayerShape, Slots

HALVES = [torch.float16, torch.bfloat16]
#: Query heads, key heads, width: groups of 1 to 8, widths that are no powers of two.
SHAPES = [(16, 8, 128), (32, 8, 128), (14, 2, 64), (12, 12, 64), (32, 8, 80), (24, 8, 96)]
WIDE = (8, 1, 256)
#: Tokens of a page that every version of torch's attention reads, if it reads any.
PAGE = 256
#: Chunks and decodes over contexts of many tiles, at and beside their ends.
LONG_ROWS = ((1, 5000), (130, 4096), (1, 1), (64, 64), (1, 257), (333, 700), (1, 4097))
LONG_DECODES = ((1, 9000), (1, 1), (1, 2048), (1, 2049), (1, 64), (1, 65), (1, 4097))
#: A pool of which one layer's keys are more numbers than 31 bits count, from block `FAR` on.
LARGE = LayerShape(kv_heads=8, key_dim=128, value_dim=128)
FAR, FAR_BLOCKS = 2**31 // (8 * 256 * 128), 80
DEVICE = torch.device("cuda")


def needs_of(shape, *, has_window=True) -> AttentionNeeds:
    heads, kv_heads, dim = shape
    return AttentionNeeds(
        heads=heads, kv_heads=kv_heads, key_dim=dim, value_dim=dim, has_window=has_window,
        has_softcap=False, has_sinks=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_served_by_flash_attention(dtype):
    """Whether its pages are read or its keys gathered is for the release of torch to say."""
    backend = choose_backend(
        "auto", dtype=dtype, device="cuda", block_size=16, needs=needs_of(SHAPES[0])
    )
    print(f"{dtype}: {backend.name}")
    assert backend.name in ("cuda", "cuda-gathered")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", AUTOMATIC["cuda"][:-1])
def test_a_backend_is_the_reference(name, block_size, shape, dtype):
    try:
        backend = BACKENDS[name]()
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    if name == "cuda" and block_size % PAGE and not takes(backend, block_size, shape, dtype):
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
@pytest.mark.parametrize("make", DECODES["cuda"])
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
    backend = choose_backend(
        "auto", dtype=torch.float32, device="cuda", block_size=16, needs=needs_of(SHAPES[0])
    )
    assert backend.name in ("cpu", "reference")


@pytest.fixture(scope="module")
def large_pool():
    """The same keys and values at its beginning and at its end, zeros between."""
    needed = 2 * 2 * (FAR + FAR_BLOCKS) * LARGE.kv_heads * 256 * LARGE.key_dim
    if (free := torch.cuda.mem_get_info()[0]) < 1.2 * needed:
        pytest.skip(f"{free} bytes are free, and such a pool takes {needed}")
    pool = KVPool(
        (LARGE,), num_blocks=FAR + FAR_BLOCKS, block_size=256, dtype=torch.bfloat16,
        device=DEVICE, num_host_blocks=1,
    )  # fmt: skip
    places = torch.arange(FAR_BLOCKS * 256, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, len(places), 8, 128, generator=generator).to(DEVICE, torch.bfloat16)
    for first in (0, FAR):
        slots = Slots(first + places // 256, places % 256)
        pool.write(0, key=key, value=value, slots=slots)
    return pool


def attended(backend, pool: KVPool, rows, *, first_block: int) -> torch.Tensor:
    """The rows over blocks one after the other."""
    query_lens, context_lens = np.array(rows, dtype=np.int64).T
    sizes = -(-context_lens // 256)
    assert sizes.sum() <= FAR_BLOCKS
    tables = np.zeros((len(rows), int(sizes.max())), dtype=np.int64)
    for table, size, end in zip(tables, sizes, np.cumsum(sizes), strict=True):
        table[:size] = first_block + np.arange(end - size, end)
    metadata = AttentionMetadata(256, query_lens, context_lens, tables, DEVICE)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(int(query_lens.sum()), 32, 128, generator=generator)
    with torch.inference_mode():
        return backend.prepare(metadata)(
            query.to(DEVICE, torch.bfloat16), pool.key_cache(0), pool.value_cache(0),
            scaling=128**-0.5,
        )  # fmt: skip


@pytest.mark.parametrize(
    "make", [*DECODES["cuda"], *(BACKENDS[name] for name in AUTOMATIC["cuda"][:-2])]
)
def test_blocks_behind_two_billion_numbers_are_attended_as_others_are(make, large_pool):
    """Whoever counts numbers of a cache in 32 bits reads somewhere else there."""
    try:
        attention = make()
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    only_decodes = make in DECODES["cuda"]
    backend, rows = (
        (DecodesOnly(attention), LONG_DECODES) if only_decodes else (attention, LONG_ROWS)
    )
    near, far = (attended(backend, large_pool, rows, first_block=first) for first in (0, FAR))
    expected = attended(ReferenceAttention(), large_pool, rows, first_block=0)
    assert worst_error(near.float(), expected.float()) <= TOLERANCES[torch.bfloat16]
    assert torch.equal(near, far)


def test_blocks_behind_two_billion_numbers_are_swapped_and_cleared_as_others_are(large_pool):
    last = FAR + FAR_BLOCKS - 1
    keys = large_pool.key_cache(0)
    before = keys[last].clone()
    large_pool.swap_out([BlockCopy(last, 0)])
    large_pool.clear(torch.tensor([last], device=DEVICE))
    assert not keys[last].any()
    assert torch.equal(keys[last - 1], keys[FAR_BLOCKS - 2])
    large_pool.swap_in([BlockCopy(0, last)])
    assert torch.equal(keys[last], before)


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
    decode = next(DecodesOnly(OneKeyShort(make())) for make in DECODES["cuda"] if available(make))
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
