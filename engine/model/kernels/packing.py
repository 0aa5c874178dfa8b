"""Packs matrices into strips of 16 outputs for the kernels, see kernels/multiply.h."""

import torch

#: Outputs of a strip; LANES in kernels/vector.h.
LANES = 16
#: Elements per 32-bit word. The kernels count sizes in words.
PER_WORD = {torch.float32: 1, torch.bfloat16: 2}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack [outputs, inputs] into [strips, inner words, 16 outputs, elements per word].

    The last strip is padded with zeros.
    """
    outputs, inputs = weight.shape
    per_word = PER_WORD[weight.dtype]
    padding = weight.new_zeros(-outputs % LANES, inputs)
    strips = torch.cat((weight, padding)) if len(padding) else weight
    return strips.view(-1, LANES, inputs // per_word, per_word).transpose(1, 2).contiguous()


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Reorder [gates, then ups] into alternating 16 gates and 16 ups, padding both with zeros."""
    halves = gate_up.view(2, -1, gate_up.shape[1])
    padding = halves.new_zeros(2, -halves.shape[1] % LANES, gate_up.shape[1])
    groups = torch.cat((halves, padding), dim=1).view(2, -1, LANES, gate_up.shape[1])
    return groups.transpose(0, 1).reshape(-1, gate_up.shape[1])
