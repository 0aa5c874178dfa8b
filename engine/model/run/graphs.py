"""Captured decode steps (CUDA graphs): one launch instead of hundreds. Knows no request.

Steps in which every row has one token differ only in the contents of their input buffers. Such a
step is captured once for each of several numbers of rows, over static buffers. A later step fills
the buffers, pads them to the next captured size with rows that belong to no request and write to
the pool's spare block, and replays the graph.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.model.attention.interface import AttentionMetadata, DecodeAttention
from engine.model.causal_model import CausalModel, StepInputs
from engine.model.device.kv_pool import KVPool, Slots
from engine.model.device.transfer import Sender
from engine.model.step import HostStep

#: Captured numbers of rows: these, then every multiple of the last one.
FIRST_SIZES = (1, 2, 4, 8)
#: Columns of the input buffer before a row's block table.
_TOKEN, _POSITION, _BLOCK, _OFFSET, _CONTEXT, _TABLE = range(6)


class Replay(Protocol):
    """A captured computation."""

    def replay(self) -> None:
        """Compute again from the buffers' current contents; the results overwrite the last ones."""
        ...


class Capturer(Protocol):
    """Records a computation; the only part of this module that needs a device."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Record `compute`; also return the tensor to which every replay writes its result."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Replay
    logits: torch.Tensor


class DecodeGraphs:
    """The captured steps of one model over one pool, one for each size.

    Args:
        kv_pool: must have a spare block.
        max_model_len: the longest context a row can have.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        decode: DecodeAttention,
        *,
        capturer: Capturer,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.name = decode.name
        self.sizes = captured_sizes(max_num_seqs)
        self._model = model
        self._kv_pool = kv_pool
        self._decode = decode
        self._max_context = max_model_len
        width = _TABLE + -(-max_model_len // kv_pool.block_size)
        padding = np.tile(self._padding_row(width), (max_num_seqs, 1))
        self._device_rows = torch.from_numpy(padding).to(device)
        numbers = [torch.zeros(padding.size, dtype=torch.int64) for _ in range(2)]
        cuda = torch.cuda if device.type == "cuda" else None
        self._senders = [Sender(host.pin_memory() if cuda else host, cuda=cuda) for host in numbers]
        # One result tensor for all sizes, in the sampler's precision: one for each size would take
        # more than a gigabyte with many sizes and a large vocabulary.
        self._logits = torch.zeros(
            max_num_seqs, model.vocab_size, dtype=torch.float32, device=device
        )
        # The largest first: the smaller ones then fit in the memory that it has allocated.
        self._captured = {size: self._capture(size, capturer) for size in reversed(self.sizes)}

    def accepts(self, step: HostStep) -> bool:
        """Whether every row is one token that needs logits, and a captured size is large enough.

        Rows with an adapter are not accepted: a captured step cannot know which rows have one. Nor
        are scored ones, whose logits come in another order.
        """
        return not (step.adapted or step.num_scored) and (
            step.num_tokens == step.metadata.num_rows == len(step.logit_rows)
            and step.num_tokens <= self.sizes[-1]
        )

    def run(self, step: HostStep) -> torch.Tensor:
        """Logits of the step's rows, [rows, vocab_size] in float32, valid until the next step."""
        assert self.accepts(step)
        size = self.sizes[bisect_left(self.sizes, step.num_tokens)]
        self._fill(step, size)
        captured = self._captured[size]
        captured.replay.replay()
        return captured.logits[: step.num_tokens]

    def _fill(self, step: HostStep, size: int) -> None:
        """Write the step and its padding to the buffers.

        The copy to the device is asynchronous. Two steps may be in flight, so two host buffers
        alternate; `Sender` waits for a buffer only after a step in flight was dropped. Only the
        columns of the step's block tables are copied: a full row takes megabytes if contexts may be
        long.
        """
        count, tables = step.num_tokens, step.metadata.block_tables
        self._senders.reverse()
        width = _TABLE + tables.shape[1]
        rows = self._senders[0].array(size, width)
        rows[:count, _TOKEN] = step.token_ids
        rows[:count, _POSITION] = step.positions
        rows[:count, _BLOCK] = step.blocks
        rows[:count, _OFFSET] = step.offsets
        rows[:count, _CONTEXT] = step.metadata.context_lens
        # Behind a shorter table, valid block ids of earlier steps remain; they are not read.
        rows[:count, _TABLE:] = tables
        rows[count:] = self._padding_row(width)
        self._senders[0].send(self._device_rows[:size, :width])
        if step.fed is not None:
            token_ids = self._device_rows[:count, _TOKEN]
            token_ids.copy_(step.fed.put_into(token_ids))

    def _padding_row(self, width: int) -> np.ndarray:
        """A row with one token, at position 0 of the spare block; its context is this token."""
        row = np.full(width, self._kv_pool.spare_block, dtype=np.int64)
        row[[_TOKEN, _POSITION, _OFFSET]] = 0
        row[_CONTEXT] = 1
        return row

    def _capture(self, size: int, capturer: Capturer) -> _Captured:
        rows = self._device_rows[:size]

        def compute() -> torch.Tensor:
            inputs = StepInputs(
                token_ids=rows[:, _TOKEN],
                positions=rows[:, _POSITION],
                slots=Slots(rows[:, _BLOCK], rows[:, _OFFSET]),
                logit_rows=torch.arange(size, device=rows.device),
                metadata=self._metadata(size, rows.device),
                attention=self._decode.plan_decodes(
                    rows[:, _CONTEXT].to(torch.int32),
                    rows[:, _TABLE:].to(torch.int32),
                    max_context=self._max_context,
                ),
            )
            logits = self._model.forward(inputs, self._kv_pool)
            return self._logits[:size].copy_(logits[:, : self._model.vocab_size])

        return _Captured(*capturer.capture(compute))

    def _metadata(self, size: int, device: torch.device) -> AttentionMetadata:
        """Metadata of padding rows: a captured step does not read the contexts in it."""
        ones = np.ones(size, dtype=np.int64)
        tables = np.full((size, 1), self._kv_pool.spare_block, dtype=np.int64)
        return AttentionMetadata(self._kv_pool.block_size, ones, ones, tables, device)


class CudaCapturer:
    """CUDA graphs that share one memory pool, since no two of them run at the same time."""

    #: Runs before a capture, so that libraries choose and load their kernels.
    WARM_UP_RUNS = 2

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: the matrix library keeps a workspace per stream, and graphs
        # that share a pool share its memory only if they were captured on the same stream.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UP_RUNS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = compute()
        return graph, result


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1 2 4 8 16 24 ... and `max_num_seqs` itself."""
    last = FIRST_SIZES[-1]
    sizes = {*FIRST_SIZES, *range(2 * last, max_num_seqs, last), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
