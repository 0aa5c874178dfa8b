"""Decode attention that splits keys, to keep a device busy with few requests (flash decoding).

Uses Triton kernels, and knows no model. The kernels read lengths and block tables on the device, so
a step can be captured once and replayed.
"""

from dataclasses import dataclass

import torch

from engine.model.attention.interface import AttentionUnavailable, StepAttention
from engine.model.device.launcher import Launcher
from engine.model.kernels.build import KernelsUnavailable

#: A row's keys are divided into at most NUM_SPLITS splits of at least MIN_SPLIT_KEYS keys.
NUM_SPLITS = 16
MIN_SPLIT_KEYS = 128
#: More programs than a device runs at once: about five hundred on an H100. Beyond that, a row has
#: MIN_PROGRAMS, so that a long context among many short ones is still computed in parallel.
ENOUGH_PROGRAMS = 4096
MIN_PROGRAMS = 4
#: Keys per tile, and the fewest rows of a matrix instruction.
TILE = 64
MIN_ROWS = 16
#: A window that is longer than any context.
NO_WINDOW = 1 << 30


class TritonDecode:
    """Attention of rows with one token each.

    Raises:
        AttentionUnavailable: Triton is not installed. A planned step also raises it: Triton cannot
            compile its kernels here, or they do not support the options.
    """

    name = "triton"

    def __init__(self) -> None:
        try:
            from engine.model.attention import triton_kernels
        except ImportError as error:
            raise AttentionUnavailable(f"Triton is not installed: {error}") from error
        self._launch = Launcher(triton_kernels)

    def plan_decodes(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, *, max_context: int
    ) -> StepAttention:
        del max_context  # The grid is the same for every context.
        return _TritonStep(self._launch, context_lens, block_tables)


@dataclass(frozen=True, slots=True)
class _TritonStep:
    launch: Launcher
    context_lens: torch.Tensor
    block_tables: torch.Tensor

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_plain = softcap is None and sinks is None
        if not is_plain or value_cache.shape[-1] != query.shape[-1]:
            raise AttentionUnavailable(
                "the Triton kernels support neither capped scores, nor sinks, nor keys and values "
                "of different widths"
            )
        try:
            return self._attend(
                query.contiguous(),
                (key_cache, value_cache),
                scaling=scaling,
                window=NO_WINDOW if sliding_window is None else sliding_window,
            )
        except KernelsUnavailable as reason:
            raise AttentionUnavailable(str(reason)) from reason

    def _attend(
        self,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        *,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        rows, heads, dim = query.shape
        kv_heads, block_size = caches[0].shape[1:3]
        sums = query.new_empty(rows, heads, NUM_SPLITS, dim, dtype=torch.float32)
        highest, totals = query.new_empty(2, rows, heads, NUM_SPLITS, dtype=torch.float32)
        output = torch.empty_like(query)
        group = heads // kv_heads
        shared = {
            "HEADS": heads,
            "DIM": dim,
            "PADDED_DIM": max(MIN_ROWS, _power_of_two(dim)),
            "NUM_SPLITS": NUM_SPLITS,
            "MIN_SPLIT_KEYS": MIN_SPLIT_KEYS,
        }
        self.launch(
            "attend_splits",
            (rows, kv_heads, programs_per_row(rows * kv_heads)),
            query,
            *caches,
            self.context_lens,
            self.block_tables,
            sums,
            highest,
            totals,
            scaling,
            window,
            self.block_tables.stride(0),
            KV_HEADS=kv_heads,
            GROUP=group,
            GROUP_ROWS=max(MIN_ROWS, _power_of_two(group)),
            BLOCK_SIZE=block_size,
            TILE=TILE,
            # Full float32 precision instead of TF32, which has 19 bits.
            PRECISION="ieee",
            **shared,
        )
        self.launch(
            "merge_splits",
            (rows, heads),
            output,
            sums,
            highest,
            totals,
            self.context_lens,
            window,
            **shared,
        )
        return output


def programs_per_row(num_rows: int) -> int:
    """Programs that share the splits of one row and key head, of `num_rows` such pairs in a step.

    Each split has a program of its own if there are few rows. With many rows, most of those would
    have no keys.
    """
    programs = NUM_SPLITS
    while programs > MIN_PROGRAMS and num_rows * programs > ENOUGH_PROGRAMS:
        programs //= 2
    return programs


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
