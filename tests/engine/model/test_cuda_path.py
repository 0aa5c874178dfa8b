"""The CUDA path without a device: what it asks of torch, its captured steps, the order of swaps.

The device's primitives come in through narrow seams, and stand-ins that compute the same on a CPU
go in there. What only a device can show is in `tests/gpu`.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.batch import BlockCopy
from engine.model.attention import cuda
from engine.model.attention.cuda import CudaAttention, find_varlen
from engine.model.attention.dense import additive, attend
from engine.model.attention.interface import AttentionMetadata, AttentionUnavailable
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    ANY_NEEDS,
    CHECKED_DECODES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
)
from engine.model.attention.triton_decode import TritonDecode
from engine.model.copy_lane import CudaLane
from engine.model.graphs import DecodeGraphs, captured_sizes
from engine.model.kv_pool import KVPool, LayerShape
from engine.model.step import compute_logits, lay_out
from tests.engine.model.builders import ROOT, make_prompt, make_row, make_runner

NO_SOFTCAP = type(ANY_NEEDS)(
    heads=6, kv_heads=2, key_dim=64, value_dim=64, has_window=True, has_softcap=False
)


def paged_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """What torch's function promises, row by row; strict about what its kernels only assume."""
    assert num_splits == 1
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[2])
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert 0 <= int(block_table.min()) <= int(block_table.max()) < len(key)
    outputs = []
    for row in range(len(seqused_k)):
        start, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        length = int(seqused_k[row])
        assert end - start <= max_q
        assert length <= max_k
        keys, values = (
            cache[block_table[row].long()].flatten(0, 1)[:length] for cache in (key, value)
        )
        seen = torch.arange(length)
        own = torch.arange(length - (end - start), length)[:, None]
        mask = seen <= own
        if window_size[0] >= 0:
            mask &= seen >= own - window_size[0]
        outputs.append(
            attend(
                query[start:end].transpose(0, 1)[None], keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None], bias=additive(mask, query.dtype), scaling=scale,
                softcap=None,
            )[0].transpose(0, 1)
        )  # fmt: skip
    return torch.cat(outputs)


@pytest.mark.parametrize("block_size", [16, 256])
def test_packed_rows_are_what_the_reference_attends(block_size):
    self_check(CudaAttention(paged_varlen), block_size=block_size, needs=NO_SOFTCAP)


def test_planned_decodes_are_what_the_reference_attends():
    backend = DecodesOnly(CudaAttention(paged_varlen))
    self_check(backend, needs=NO_SOFTCAP, rows=CHECKED_DECODES)


def test_a_function_that_is_wrong_after_the_first_row_is_found_out():
    """What a split over the keys does to torch's paged kernel."""

    def first_row_only(*arguments, **options):
        attended = paged_varlen(*arguments, **options)
        attended[int(arguments[3][1]) :] *= 1.5
        return attended

    first_row_only.__signature__ = cuda.inspect.signature(paged_varlen)
    with pytest.raises(AttentionCheckFailed, match="'cuda' is off by"):
        self_check(CudaAttention(first_row_only), needs=NO_SOFTCAP)


def test_capped_scores_are_left_to_another_backend():
    with pytest.raises(AttentionCheckFailed, match="caps no scores"):
        self_check(CudaAttention(paged_varlen), needs=ANY_NEEDS)


def test_a_release_of_torch_that_lacks_an_option_is_named_by_it(monkeypatch):
    monkeypatch.setattr(cuda, "REQUIRED_OPTIONS", frozenset({"block_table", "leaps"}))
    with pytest.raises(AttentionUnavailable, match="does not take leaps"):
        find_varlen()


class Eager:
    """Captures by remembering the function, and replays by calling it."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def capture(self, compute):
        result = compute()
        capturer = self

        class Again:
            def replay(self) -> None:
                capturer.replayed.append(len(result))
                result.copy_(compute())

        return Again(), result


class DenseDecode:
    """Decodes by the reference, the lengths read when it is called, as a captured step would."""

    name = "dense"

    def plan_decodes(self, context_lens, block_tables, *, max_context):
        lengths = context_lens.numpy().astype(np.int64)
        assert lengths.max() <= max_context
        block_size = BLOCK_SIZE
        tables = block_tables.numpy().astype(np.int64)
        return ReferenceAttention().prepare(
            AttentionMetadata(
                block_size, np.ones_like(lengths), lengths, tables, torch.device("cpu")
            )
        )


BLOCK_SIZE = 4
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def decoder(model_folder):
    runner = make_runner(model_folder("qwen3"), model_path="fast", attention_backend="reference")
    assert runner.model.name == "decoder-torch"
    return runner.model


def filled_pool(decoder) -> KVPool:
    pool = KVPool(
        decoder.layer_shapes,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        has_spare_block=True,
    )
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(decoder.layer_shapes)):
        for cache in (pool.key_cache(layer), pool.value_cache(layer)):
            cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def graphs_over(decoder, pool, *, max_num_seqs=20) -> tuple[DecodeGraphs, Eager]:
    capturer = Eager()
    with torch.inference_mode():
        graphs = DecodeGraphs(
            decoder,
            pool,
            DenseDecode(),
            capturer=capturer,
            device=torch.device("cpu"),
            max_num_seqs=max_num_seqs,
            max_model_len=40,
        )
    return graphs, capturer


def decodes(*contexts: int):
    rows = [
        make_row(
            make_prompt(length, salt=index), request_id=str(index), start=length - 1,
            block_ids=range(index, NUM_BLOCKS, 16),
        )
        for index, length in enumerate(contexts)
    ]  # fmt: skip
    return lay_out(rows, block_size=BLOCK_SIZE, device=torch.device("cpu"))


@torch.inference_mode()
def logits(decoder, pool, step, graphs=None) -> torch.Tensor:
    backend = ReferenceAttention()
    return compute_logits(step, model=decoder, kv_pool=pool, backend=backend, graphs=graphs).clone()


def test_sizes_are_powers_of_two_and_then_every_eighth():
    assert captured_sizes(1) == (1,)
    assert captured_sizes(8) == (1, 2, 4, 8)
    assert captured_sizes(13) == (1, 2, 4, 8, 13)
    assert captured_sizes(32) == (1, 2, 4, 8, 16, 24, 32)


def test_a_replayed_step_has_the_logits_of_the_step_itself_and_writes_the_same(decoder):
    """Steps of many sizes in turn, so that what one leaves in the buffers could harm the next."""
    graphs, capturer = graphs_over(decoder, replayed_pool := filled_pool(decoder))
    plain_pool = filled_pool(decoder)
    for contexts in ((9, 3, 16), (1,), (5, 6, 7, 8, 9), (2, 12), (16,) * 16, (3,) * 9, (4,)):
        step = decodes(*contexts)
        expected = logits(decoder, plain_pool, step)
        torch.testing.assert_close(logits(decoder, replayed_pool, step, graphs), expected)
        for layer in range(len(decoder.layer_shapes)):
            torch.testing.assert_close(
                replayed_pool.key_cache(layer)[:NUM_BLOCKS],
                plain_pool.key_cache(layer)[:NUM_BLOCKS],
            )
    assert capturer.replayed == [4, 1, 8, 2, 16, 16, 1]


def test_chunks_and_steps_that_sample_only_in_part_are_not_replayed(decoder):
    graphs, _ = graphs_over(decoder, filled_pool(decoder), max_num_seqs=4)
    device = torch.device("cpu")
    chunk = lay_out([make_row(make_prompt(5))], block_size=BLOCK_SIZE, device=device)
    one_of_two = make_row(make_prompt(2), end=1)
    silent = lay_out([one_of_two], block_size=BLOCK_SIZE, device=device)
    assert graphs.accepts(decodes(3, 3, 3, 3))
    assert not graphs.accepts(decodes(3, 3, 3, 3, 3))
    assert not graphs.accepts(chunk)
    assert not graphs.accepts(silent)


class RecordedStreams:
    """`torch.cuda` as far as the lane uses it; notes who waits for whom."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = RecordedStream("computing", self.events)

    def Stream(self):  # noqa: N802  The name is torch's.
        return RecordedStream("copying", self.events)

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        self.events.append(f"enter {stream.name}")
        yield
        self.events.append(f"leave {stream.name}")


class RecordedStream:
    def __init__(self, name, events) -> None:
        self.name = name
        self._events = events

    def wait_stream(self, other) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


def test_swaps_begin_after_what_was_computed_and_end_before_what_will_be():
    streams = RecordedStreams()
    pool = KVPool(
        (LayerShape(1, 4, 4),), num_blocks=2, block_size=2, dtype=torch.float32,
        num_host_blocks=1, lane=CudaLane(streams),
    )  # fmt: skip
    pool.swap_out([])
    assert streams.events == []
    pool.swap_out([BlockCopy(1, 0)])
    assert streams.events == [
        "copying waits for computing",
        "enter copying",
        "leave copying",
        "computing waits for copying",
    ]


def test_a_failed_swap_still_holds_the_computations_back():
    streams = RecordedStreams()
    lane = CudaLane(streams)
    with pytest.raises(RuntimeError, match="lost"), lane.copying():
        raise RuntimeError("the copy was lost")
    assert streams.events[-1] == "computing waits for copying"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_triton_kernels_are_what_the_reference_attends(dtype):
    """In Triton's interpreter, which knows no bfloat16; in a process of its own, as it must."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter cannot loop over tensors with numpy 2.4 and later")
    code = (
        "import torch\n"
        "from tests.engine.model.test_cuda_path import check_triton\n"
        f"check_triton(torch.{dtype})\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def check_triton(dtype: torch.dtype) -> None:
    for block_size in (16, 256):
        self_check(
            DecodesOnly(TritonDecode()),
            dtype=dtype,
            block_size=block_size,
            needs=NO_SOFTCAP,
            rows=CHECKED_DECODES,
        )
