"""Captured steps without a device: recorded as a list of operations, and replayed from that."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.dense import additive, attend, visible
from engine.model.attention.reference import ReferenceAttention
from engine.model.device.kv_pool import KVPool
from engine.model.device.transfer import Sender
from engine.model.run.graphs import DecodeGraphs, captured_sizes
from engine.model.step import compute_logits, lay_out
from tests.engine.model.builders import generate, make_prompt, make_request, make_row, make_runner


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
        def attend_tables(
            query, key_cache, value_cache, *, scaling, sliding_window, softcap, sinks
        ):
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
                bias=additive(seen, query.dtype)[:, None], scaling=scaling,
                softcap=softcap, sinks=sinks,
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


def graphs_over(decoder, pool, *, max_num_seqs=4, capturer=None) -> tuple[DecodeGraphs, Recorder]:
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


@pytest.fixture(scope="module")
def captured(decoder):
    """Steps that were captured once, and their pool, for tests that do not look into it."""
    pool = filled_pool(decoder)
    return graphs_over(decoder, pool)[0], pool


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
    replayed_pool = filled_pool(decoder)
    graphs, capturer = graphs_over(decoder, replayed_pool, max_num_seqs=20)
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


def test_a_step_in_flight_keeps_what_its_copy_reads_while_the_next_one_is_filled(decoder, captured):
    graphs, pool = captured
    logits(decoder, pool, decodes(9, 3, 16), graphs)
    in_flight = graphs._senders[0]
    rows = in_flight.array(4, 9).copy()
    logits(decoder, pool, decodes(5, 12, 7), graphs)
    assert graphs._senders[0] is not in_flight
    assert np.array_equal(in_flight.array(4, 9), rows)
    logits(decoder, pool, decodes(4, 2, 6), graphs)
    assert graphs._senders[0] is in_flight


def test_of_the_tables_only_the_columns_in_use_are_sent(decoder, captured, monkeypatch):
    sent = []
    monkeypatch.setattr(Sender, "send", lambda sender, rows: sent.append(tuple(rows.shape)))
    graphs, pool = captured
    logits(decoder, pool, decodes(9, 3, 13), graphs)
    # Three rows and one of padding; five numbers of each and four blocks of the longest.
    assert sent == [(4, 5 + 4)]


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


def test_chunks_and_steps_that_sample_only_in_part_are_not_replayed(captured):
    graphs, _ = captured
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
    assert not graphs.accepts(replace(decodes(3, 3), num_scored=1))


@pytest.mark.parametrize(("backend", "times"), [(ReferenceAttention(), 0), (CpuAttention(), 2)])
def test_blocks_are_cleared_where_what_nobody_wrote_is_read_and_nowhere_else(
    backend, times, decoder, captured, monkeypatch
):
    """Two launches per layer would stand before the one of a captured step."""
    (graphs, pool), cleared = captured, []
    monkeypatch.setattr(pool, "clear", lambda blocks: cleared.append(blocks.tolist()))
    begins_a_block = decodes(2, 5, 8, 13)
    for replayed in (graphs, None):
        with torch.inference_mode():
            compute_logits(
                begins_a_block, model=decoder, kv_pool=pool, backend=backend, graphs=replayed
            )
    expected = [begins_a_block.metadata.block_tables[row, last] for row, last in ((1, 1), (3, 3))]
    assert cleared == [expected] * times
