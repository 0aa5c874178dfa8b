"""Packs matrices into strips of 16 outputs for the kernels, see kernels/multiply.h.

Quantized weights are packed into panels of 32 outputs, see kernels/panels.h.
"""

import torch

from engine.model.kernels.quantized import GROUP, QuantizedWeight

#: Outputs of a strip; LANES in kernels/vector.h.
LANES = 16
#: Outputs of a panel; PANEL in kernels/panels.h.
PANEL = 32
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


def pack_panels(weight: QuantizedWeight) -> torch.Tensor:
    """Pack [outputs, inputs] into [panels, groups, bytes], as kernels/panels.h describes.

    The last panel is padded with outputs of scale zero.
    """
    scales = [scale for scale in (weight.scales, weight.minima) if scale is not None]
    factors = [_padded(one).transpose(1, 2).contiguous().view(torch.uint8) for one in scales]
    numbers = _padded(weight.numbers)
    groups = numbers.view(len(numbers), PANEL, -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if weight.bits == 4:
        groups = groups[:, :, ::2] | groups[:, :, 1::2] << 4
    return torch.cat((*factors, groups.flatten(2)), dim=2)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, columns] as [panels, outputs of a panel, columns], padded with zeros."""
    padding = rows.new_zeros(-len(rows) % PANEL, rows.shape[1])
    return torch.cat((rows, padding)).view(-1, PANEL, rows.shape[1])
