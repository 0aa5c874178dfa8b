"""The pool's bytes: what a block takes, and that moving it changes no bit."""

import os
from pathlib import Path

import pytest
import torch

from engine.batch import BlockCopy
from engine.model.device.kv_pool import (
    CACHE_LINE_BYTES,
    KVPool,
    LayerShape,
    Slots,
    bytes_per_block,
    num_blocks_for,
    runs_of,
)

SHAPES = (LayerShape(2, 8, 8), LayerShape(4, 24, 12))


def make_pool(**overrides) -> KVPool:
    values = {"num_blocks": 6, "block_size": 4, "dtype": torch.float32, "num_host_blocks": 3}
    return KVPool(SHAPES, **(values | overrides))


def tensors(pool: KVPool) -> list[torch.Tensor]:
    return [
        cache(layer) for layer in range(len(SHAPES)) for cache in (pool.key_cache, pool.value_cache)
    ]


def scramble(pool: KVPool) -> None:
    """Every bit pattern there is, the many NaNs included."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors(pool):
        bits = torch.randint(-(2**31), 2**31, tensor.shape, generator=generator)
        tensor.copy_(bits.to(torch.int32).view(torch.float32))


def bits(pool: KVPool, block: int) -> list[list[int]]:
    return [tensor[block].view(torch.int32).flatten().tolist() for tensor in tensors(pool)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_block_are_those_of_the_tensors(dtype):
    pool = make_pool(dtype=dtype)
    assert pool.bytes_per_block * pool.num_blocks == pool.nbytes
    assert pool.nbytes == sum(tensor.nbytes for tensor in tensors(pool))
    assert pool.host_nbytes == pool.bytes_per_block * pool.num_host_blocks
    assert bytes_per_block(SHAPES, block_size=4, dtype=dtype) == pool.bytes_per_block
    per_token = (2 * (8 + 8) + 4 * (24 + 12)) * dtype.itemsize
    assert pool.bytes_per_block == 4 * per_token


def test_memory_is_divided_into_whole_blocks():
    size = bytes_per_block(SHAPES, block_size=4, dtype=torch.float32)
    for memory, blocks in ((10 * size, 10), (10 * size - 1, 9), (size - 1, 0), (-5, 0)):
        assert num_blocks_for(memory, SHAPES, block_size=4, dtype=torch.float32) == blocks


def test_a_token_is_written_to_its_slot_and_nowhere_else():
    pool = make_pool()
    key, value = torch.ones(2, 4, 24), torch.full((2, 4, 12), 2.0)
    pool.write(1, key=key, value=value, slots=Slots(torch.tensor([5, 2]), torch.tensor([3, 0])))
    assert pool.key_cache(1)[5, :, 3].eq(1).all()
    assert pool.value_cache(1)[2, :, 0].eq(2).all()
    assert pool.key_cache(1).count_nonzero() == key.numel()
    assert pool.value_cache(1).count_nonzero() == value.numel()
    assert not pool.key_cache(0).any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_memory_of_blocks_is_there_once_they_are_made_and_no_sooner():
    before = resident_bytes()
    pool = make_pool(num_blocks=32768, block_size=16, num_host_blocks=0)
    unmade = resident_bytes() - before
    pool.touch(range(8192))
    made = resident_bytes() - before
    assert pool.nbytes > 320 << 20
    assert unmade < pool.nbytes / 20
    assert pool.nbytes / 5 < made < pool.nbytes / 2
    assert not any(tensor.any() for tensor in tensors(pool))


def test_a_swap_there_and_back_changes_no_bit_and_no_other_block():
    pool = make_pool()
    scramble(pool)
    before = {block: bits(pool, block) for block in range(6)}
    pool.swap_out([BlockCopy(4, 0), BlockCopy(1, 2)])
    for tensor in tensors(pool):
        tensor[torch.tensor([1, 4])] = 7.0
    pool.swap_in([BlockCopy(0, 3), BlockCopy(2, 4)])
    assert bits(pool, 3) == before[4]
    assert bits(pool, 4) == before[1]
    for untouched in (0, 2, 5):
        assert bits(pool, untouched) == before[untouched]


def test_a_device_is_asked_for_one_copy_per_run_of_neighbours():
    copies = [BlockCopy(*pair) for pair in ((7, 2), (3, 5), (9, 0), (4, 6), (8, 3), (5, 8))]
    runs = list(runs_of(copies))
    assert runs == [
        (BlockCopy(3, 5), 2),
        (BlockCopy(5, 8), 1),
        (BlockCopy(7, 2), 2),
        (BlockCopy(9, 0), 1),
    ]
    assert list(runs_of([])) == []


def test_clearing_zeroes_whole_blocks_of_every_layer():
    pool = make_pool()
    scramble(pool)
    kept = bits(pool, 0)
    pool.clear(torch.tensor([1, 5]))
    for tensor in tensors(pool):
        assert not tensor[[1, 5]].any()
    assert bits(pool, 0) == kept


def resident_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def test_a_pool_takes_no_memory_of_a_cpu_before_its_blocks_are_used():
    before = resident_kilobytes()
    pool = KVPool(
        (LayerShape(8, 128, 128),) * 4, num_blocks=4096, block_size=16, dtype=torch.bfloat16
    )
    assert pool.nbytes == 1 << 30
    assert resident_kilobytes() - before < 64 * 1024
    assert not pool.key_cache(3)[4095].any()


@pytest.mark.parametrize("num_blocks", [1, 3, 5000])
def test_blocks_begin_with_a_cache_line(num_blocks):
    pool = make_pool(num_blocks=num_blocks)
    assert all(tensor.data_ptr() % CACHE_LINE_BYTES == 0 for tensor in tensors(pool))
