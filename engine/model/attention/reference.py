"""Paged attention one request at a time: the oracle with which every other backend is compared.

No batching and no optimisation: it gathers the slots of each row and calls dense attention.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.model.attention.dense import additive, attend, visible
from engine.model.attention.interface import AttentionMetadata, StepAttention


class ReferenceAttention:
    """The slow and simple backend, for any device."""

    name = "reference"
    reads_unwritten_slots = False

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return _ReferenceStep(metadata)


@dataclass(frozen=True, slots=True)
class _ReferenceStep:
    metadata: AttentionMetadata

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
        metadata = self.metadata
        outputs = []
        for row in range(metadata.num_rows):
            end, length = int(metadata.context_lens[row]), int(metadata.query_lens[row])
            offset = int(metadata.offsets[row])
            key_positions = torch.arange(end, device=query.device)
            table = torch.from_numpy(metadata.block_tables[row]).to(query.device)
            blocks = table[key_positions // metadata.block_size]
            slots = key_positions % metadata.block_size
            mask = visible(key_positions[end - length :], key_positions, sliding_window)
            with _unfused(query.device):
                attended = attend(
                    query[offset : offset + length].transpose(0, 1).unsqueeze(0),
                    key_cache[blocks, :, slots].transpose(0, 1).unsqueeze(0),
                    value_cache[blocks, :, slots].transpose(0, 1).unsqueeze(0),
                    bias=additive(mask, query.dtype),
                    scaling=scaling,
                    softcap=softcap,
                    sinks=None if sinks is None else sinks[:, None, None],
                )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)


def _unfused(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA, exclude torch's fused kernels: the oracle must be independent of them."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()
