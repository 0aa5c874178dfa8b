"""The CUDA path without a device: what it asks of torch, and its captured steps.

The device's primitives come in through narrow seams, and stand-ins that compute the same on a CPU
go in there. What only a device can show is in `tests/gpu`.
"""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model import attention
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.dense import additive, attend, visible
from engine.model.attention.gathered import MAX_GATHERED_KEYS, GatheredAttention
from engine.model.attention.interface import AttentionUnavailable
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    ANY_NEEDS,
    CHECKED_DECODES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
)
from engine.model.attention.varlen import find_varlen
from engine.model.graphs import DecodeGraphs, captured_sizes
from engine.model.kv_pool import KVPool
from engine.model.step import compute_logits, lay_out
from tests.engine.model.builders import (
    generate,
    make_prompt,
    make_request,
    make_row,
    make_runner,
)

NO_SOFTCAP = type(ANY_NEEDS)(
    heads=6, kv_heads=2, key_dim=64, value_dim=64, has_window=True, has_softcap=False
)


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
                softcap=None,
            )[0].transpose(0, 1)
        )  # fmt: skip
    return torch.cat(outputs)


@pytest.mark.parametrize("block_size", [16, 256])
def test_packed_rows_are_what_the_reference_attends(block_size):
    self_check(CudaAttention(paged_varlen), block_size=block_size, needs=NO_SOFTCAP)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("max_keys", [1, 60, MAX_GATHERED_KEYS])
def test_gathered_rows_are_what_the_reference_attends(block_size, max_keys):
    """In one run, in several, and with a run for every row."""
    backend = GatheredAttention(packed_varlen, max_keys=max_keys)
    self_check(backend, block_size=block_size, needs=NO_SOFTCAP)
    self_check(backend, block_size=block_size, needs=NO_SOFTCAP, rows=CHECKED_DECODES)


def test_where_torch_reads_no_pages_keys_are_gathered(monkeypatch):
    def no_pages():
        raise AttentionUnavailable("torch's varlen_attn does not take block_table")

    monkeypatch.setitem(attention.AUTOMATIC, "cpu", attention.AUTOMATIC["cuda"])
    monkeypatch.setitem(attention.BACKENDS, "cuda", no_pages)
    monkeypatch.setitem(
        attention.BACKENDS, "cuda-gathered", lambda: GatheredAttention(packed_varlen)
    )
    backend, block_size = attention.choose_backend(
        "auto", dtype=torch.float32, device="cpu", block_size=16, needs=NO_SOFTCAP
    )
    assert (backend.name, block_size) == ("cuda-gathered", 16)


def test_planned_decodes_are_what_the_reference_attends():
    backend = DecodesOnly(CudaAttention(paged_varlen))
    self_check(backend, needs=NO_SOFTCAP, rows=CHECKED_DECODES)


def test_a_function_that_is_wrong_after_the_first_row_is_found_out():
    """What a split over the keys does to torch's paged kernel."""

    def first_row_only(*arguments, **options):
        attended = paged_varlen(*arguments, **options)
        attended[int(arguments[3][1]) :] *= 1.5
        return attended

    first_row_only.__signature__ = inspect.signature(paged_varlen)
    with pytest.raises(AttentionCheckFailed, match="'cuda' is off by"):
        self_check(CudaAttention(first_row_only), needs=NO_SOFTCAP)


@pytest.mark.parametrize("backend", [CudaAttention(paged_varlen), GatheredAttention(packed_varlen)])
def test_capped_scores_are_left_to_another_backend(backend):
    with pytest.raises(AttentionCheckFailed, match="caps no scores"):
        self_check(backend, needs=ANY_NEEDS)


def test_a_release_of_torch_that_lacks_an_option_is_named_by_it():
    with pytest.raises(AttentionUnavailable, match="does not take leaps"):
        find_varlen({"scale", "leaps"})


def test_this_release_of_torch_has_what_gathered_keys_need():
    assert GatheredAttention().name == "cuda-gathered"


class Recorder:
    """Captures the operations and their tensors, and replays those: Python is not asked again."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def capture(self, compute):
        recorded = make_fx(compute)()
        result = recorded()
        recorder = self

        class Again:
            def replay(self) -> None:
                recorder.replayed.append(len(result))
                recorded()

        return Again(), result


class MaskedDecode:
    """Decodes over whole tables, what is behind a context masked: reads nothing on the host."""

    name = "masked"

    def plan_decodes(self, context_lens, block_tables, *, max_context):
        def attend_tables(query, key_cache, value_cache, *, scaling, sliding_window, softcap=None):
            rows, kv_heads = len(query), key_cache.shape[1]
            keys, values = (
                cache[block_tables].transpose(1, 2).flatten(2, 3)
                for cache in (key_cache, value_cache)
            )
            last = (context_lens - 1)[:, None]
            seen = visible(last, torch.arange(keys.shape[2], device=last.device), sliding_window)
            # What is not seen may be no number, and neither a weight of zero nor a score of minus
            # infinity makes one of it.
            keys, values = (
                tensor.masked_fill(~seen[:, :, :, None], 0) for tensor in (keys, values)
            )
            return attend(
                query.view(rows, kv_heads, -1, query.shape[-1]), keys, values,
                bias=additive(seen, query.dtype)[:, None], scaling=scaling, softcap=softcap,
            ).flatten(1, 2)  # fmt: skip

        return attend_tables


BLOCK_SIZE = 4
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def decoder(model_folder):
    runner = make_runner(model_folder("qwen3"), model_path="fast", attention_backend="reference")
    assert runner.model.name == "decoder-torch"
    return runner.model


def filled_pool(decoder, *, num_blocks=NUM_BLOCKS, num_host_blocks=0) -> KVPool:
    pool = KVPool(
        decoder.layer_shapes,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        num_host_blocks=num_host_blocks,
        has_spare_block=True,
    )
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(decoder.layer_shapes)):
        for cache in (pool.key_cache(layer), pool.value_cache(layer)):
            cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def graphs_over(decoder, pool, *, max_num_seqs=20, capturer=None) -> tuple[DecodeGraphs, Recorder]:
    capturer = capturer or Recorder()
    with torch.inference_mode():
        graphs = DecodeGraphs(
            decoder,
            pool,
            MaskedDecode(),
            capturer=capturer,
            device=torch.device("cpu"),
            max_num_seqs=max_num_seqs,
            max_model_len=256,
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


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_over_captured_steps_generates_what_one_over_plain_steps_does(
    model_folder, ahead
):
    """Greedy and drawn, the pool full of NaN at first, and blocks that change hands."""
    options = {"model_path": "fast", "attention_backend": "cpu", "num_blocks": 40}

    def tokens_of(runner) -> dict[str, list[int]]:
        requests = [
            make_request(
                str(index), make_prompt(3 + 5 * index, salt=index), max_tokens=15, seed=index,
                **({"temperature": 0.9, "top_p": 0.95} if index % 2 else {}),
            )
            for index in range(6)
        ]  # fmt: skip
        generated = generate(runner, requests)
        assert generated.snapshot.preemptions_swap + generated.snapshot.preemptions_recompute > 0
        return generated.tokens

    captured = make_runner(model_folder("qwen3"), **options)
    captured.kv_pool = filled_pool(captured.model, num_blocks=40, num_host_blocks=64)
    captured._runs_ahead = ahead
    captured._graphs, recorder = graphs_over(captured.model, captured.kv_pool, max_num_seqs=8)
    plain = make_runner(model_folder("qwen3"), **options)
    assert tokens_of(captured) == tokens_of(plain)
    assert len(recorder.replayed) > 15


def test_a_step_that_left_its_buffers_as_they_were_would_be_seen(decoder, monkeypatch):
    graphs, _ = graphs_over(decoder, pool := filled_pool(decoder))
    logits(decoder, pool, decodes(9, 3, 16), graphs)
    step = decodes(5, 12, 7)
    expected = logits(decoder, filled_pool(decoder), step)
    monkeypatch.setattr(DecodeGraphs, "_fill", lambda *arguments: None)
    stale = logits(decoder, pool, step, graphs)
    assert bool(((stale - expected).norm(dim=-1) > 0.1 * expected.norm(dim=-1)).all())


def test_a_step_in_flight_keeps_what_its_copy_reads_while_the_next_one_is_filled(decoder):
    graphs, _ = graphs_over(decoder, pool := filled_pool(decoder))
    logits(decoder, pool, decodes(9, 3, 16), graphs)
    in_flight = graphs._senders[0]
    rows = in_flight.array().copy()
    logits(decoder, pool, decodes(5, 12, 7), graphs)
    assert graphs._senders[0] is not in_flight
    assert np.array_equal(in_flight.array(), rows)
    logits(decoder, pool, decodes(4, 2, 6), graphs)
    assert graphs._senders[0] is in_flight


class NoQuestions(TorchDispatchMode):
    """Refuses what makes the host wait for the device, as a capture would."""

    QUESTIONS = (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
        torch.ops.aten.equal,
    )
    INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asks = func.overloadpacket in self.QUESTIONS
        if func.overloadpacket in self.INDEXED:
            # How many are true decides the shape of the result.
            asks = any(index is not None and index.dtype == torch.bool for index in args[1])
        assert not asks, f"{func} asks the device"
        return func(*args, **(kwargs or {}))


class Strict(Recorder):
    def capture(self, compute):
        with NoQuestions():
            compute()
        return super().capture(compute)


def test_a_captured_step_asks_the_device_nothing(decoder):
    graphs_over(decoder, filled_pool(decoder), capturer=Strict())


@pytest.mark.parametrize(
    "question",
    [lambda ones: ones.sum().item(), lambda ones: ones[ones > 0], lambda ones: bool(ones[0])],
)
def test_a_question_to_the_device_would_be_seen(question):
    with NoQuestions(), pytest.raises(AssertionError, match="asks the device"):
        question(torch.ones(2))


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
    # What a step adds was not known when it was captured.
    assert graphs.accepts(decodes(3, 3))
    assert not graphs.accepts(replace(decodes(3, 3), adapted={"a": np.array([1])}))
