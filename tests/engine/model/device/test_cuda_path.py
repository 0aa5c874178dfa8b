"""The CUDA path without a device: what its attention asks of torch.

Torch's functions come in through narrow seams, and stand-ins that compute the same on a CPU go in
there. What only a device can show is in `tests/gpu`.
"""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from engine.model import attention
from engine.model.attention import gathered
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.dense import additive, attend
from engine.model.attention.gathered import MAX_GATHERED_KEYS, GatheredAttention
from engine.model.attention.interface import AttentionMetadata, AttentionUnavailable
from engine.model.attention.self_check import (
    ANY_NEEDS,
    CHECKED_DECODES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
)
from engine.model.attention.varlen import find_varlen
from engine.model.device.transfer import to_device

PLAIN = type(ANY_NEEDS)(
    heads=6, kv_heads=2, key_dim=64, value_dim=64, has_window=True, has_softcap=False,
    has_sinks=False,
)  # fmt: skip


def paged_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """What torch 2.13 promises, row by row; strict about what its kernels only assume."""
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    for tensor in (seqused_k, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    assert 0 <= int(block_table.min()) <= int(block_table.max()) < len(key)
    keys, values = (
        [
            cache[table.long()].flatten(0, 1)[:length]
            for table, length in zip(block_table, seqused_k.tolist(), strict=True)
        ]
        for cache in (key, value)
    )
    return attend_rows(query, keys, values, cu_seq_q, max_q, max_k, scale, window_size)


def packed_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1),
):  # fmt: skip
    """The same of torch 2.11, which reads no pages and infers that heads are grouped."""
    assert query.shape[1] % key.shape[1] == 0
    assert key.is_contiguous() and value.is_contiguous()
    assert cu_seq_k.dtype == torch.int32
    assert int(cu_seq_k[-1]) == len(key) == len(value)
    lengths = cu_seq_k.diff().tolist()
    keys, values = key.split(lengths), value.split(lengths)
    return attend_rows(query, keys, values, cu_seq_q, max_q, max_k, scale, window_size)


def attend_rows(query, keys, values, cu_seq_q, max_q, max_k, scale, window_size):
    """Every row to its own keys, [keys, kv_heads, dim]: the last query is the last key's token."""
    assert window_size[1] == 0
    assert query.is_contiguous() and cu_seq_q.is_contiguous()
    assert cu_seq_q.dtype == torch.int32
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().max()) <= max_q
    assert max(map(len, keys)) <= max_k
    outputs = []
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        start, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        seen = torch.arange(len(key))
        own = torch.arange(len(key) - (end - start), len(key))[:, None]
        mask = seen <= own
        if window_size[0] >= 0:
            mask &= seen >= own - window_size[0]
        outputs.append(
            attend(
                query[start:end].transpose(0, 1)[None], key.transpose(0, 1)[None],
                value.transpose(0, 1)[None], bias=additive(mask, query.dtype), scaling=scale,
                softcap=None, sinks=None,
            )[0].transpose(0, 1)
        )  # fmt: skip
    return torch.cat(outputs)


@pytest.mark.parametrize("block_size", [16, 256])
def test_packed_rows_are_what_the_reference_attends(block_size):
    self_check(CudaAttention(paged_varlen), block_size=block_size, needs=PLAIN)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("max_keys", [1, 60, MAX_GATHERED_KEYS])
def test_gathered_rows_are_what_the_reference_attends(block_size, max_keys):
    """In one run, in several, and with a run for every row."""
    backend = GatheredAttention(packed_varlen, max_keys=max_keys)
    self_check(backend, block_size=block_size, needs=PLAIN)
    self_check(backend, block_size=block_size, needs=PLAIN, rows=CHECKED_DECODES)


def no_pages():
    raise AttentionUnavailable("torch's varlen_attn does not take block_table")


def large_pages():
    """As with FlashAttention 2, whose pages are multiples of 256 tokens."""

    def varlen(query, key, *rest, **options):
        if key.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        return paged_varlen(query, key, *rest, **options)

    varlen.__signature__ = inspect.signature(paged_varlen)
    return CudaAttention(varlen)


@pytest.mark.parametrize("make", [no_pages, large_pages])
def test_where_torch_reads_no_pages_of_a_block_s_size_keys_are_gathered(make, monkeypatch):
    monkeypatch.setitem(attention.AUTOMATIC, "cpu", attention.AUTOMATIC["cuda"])
    monkeypatch.setitem(attention.BACKENDS, "cuda", make)
    monkeypatch.setitem(
        attention.BACKENDS, "cuda-gathered", lambda: GatheredAttention(packed_varlen)
    )
    options = {"dtype": torch.float32, "device": "cpu", "needs": PLAIN}
    assert attention.choose_backend("auto", block_size=16, **options).name == "cuda-gathered"
    if make is large_pages:
        assert attention.choose_backend("auto", block_size=256, **options).name == "cuda"


def test_planned_decodes_are_what_the_reference_attends():
    backend = DecodesOnly(CudaAttention(paged_varlen))
    self_check(backend, needs=PLAIN, rows=CHECKED_DECODES)


def test_a_function_that_is_wrong_after_the_first_row_is_found_out():
    """What a split over the keys does to torch's paged kernel."""

    def first_row_only(*arguments, **options):
        attended = paged_varlen(*arguments, **options)
        attended[int(arguments[3][1]) :] *= 1.5
        return attended

    first_row_only.__signature__ = inspect.signature(paged_varlen)
    with pytest.raises(AttentionCheckFailed, match="'cuda' is off by"):
        self_check(CudaAttention(first_row_only), needs=PLAIN)


@pytest.mark.parametrize("backend", [CudaAttention(paged_varlen), GatheredAttention(packed_varlen)])
def test_capped_scores_are_left_to_another_backend(backend):
    with pytest.raises(AttentionCheckFailed, match="does not support capped scores"):
        self_check(backend, needs=ANY_NEEDS)


def test_on_a_gpu_sinks_are_left_to_torch_operations(monkeypatch, caplog):
    monkeypatch.setitem(attention.AUTOMATIC, "cpu", attention.AUTOMATIC["cuda"])
    monkeypatch.setitem(attention.BACKENDS, "cuda", lambda: CudaAttention(paged_varlen))
    monkeypatch.setitem(
        attention.BACKENDS, "cuda-gathered", lambda: GatheredAttention(packed_varlen)
    )
    backend = attention.choose_backend(
        "auto",
        dtype=torch.float32,
        device="cpu",
        block_size=16,
        needs=dataclasses.replace(PLAIN, has_sinks=True),
    )
    assert backend.name == "cpu"
    for name in ("cuda", "cuda-gathered"):
        assert f"the attention backend '{name}' does not support sinks" in caplog.text


def test_a_release_of_torch_that_lacks_an_option_is_named_by_it():
    with pytest.raises(AttentionUnavailable, match="does not have leaps"):
        find_varlen({"scale", "leaps"})


def test_this_release_of_torch_has_what_gathered_keys_need():
    assert GatheredAttention().name == "cuda-gathered"


class LargestSent:
    """`to_device`, and how many numbers it was given at most."""

    def __init__(self) -> None:
        self.numbers = 0

    def __call__(self, array, device) -> torch.Tensor:
        self.numbers = max(self.numbers, array.size)
        return to_device(array, device)


def test_where_keys_lie_is_told_by_their_blocks_and_not_key_by_key(monkeypatch):
    """Thousands of long contexts are millions of keys, for which the host had to find a slot."""
    sent = LargestSent()
    monkeypatch.setattr(gathered, "to_device", sent)
    lengths = np.array([4000, 3000])
    blocks = np.arange(2 * 250).reshape(2, 250)
    metadata = AttentionMetadata(16, np.ones_like(lengths), lengths, blocks, torch.device("cpu"))
    (run,) = GatheredAttention(packed_varlen).prepare(metadata).ranges
    assert sent.numbers == blocks.size
    slots = (run.blocks * 16 + run.offsets).tolist()
    assert slots == [*range(4000), *range(4000, 7000)]
