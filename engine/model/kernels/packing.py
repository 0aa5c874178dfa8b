"""Packs matrices into strips of 16 outputs for the kernels, see kernels/multiply.h.

Quantized weights are packed into panels of 32 outputs, see kernels/panels.h.
"""

from collections.abc import Iterator

import torch

from engine.model.kernels.quantized import GROUP, NESTED_GROUPS, QuantizedWeight

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
    """Pack [outputs, inputs] into [panels, bytes], as kernels/panels.h describes.

    The last panel is padded with outputs of scale zero.
    """
    numbers = _padded(weight.numbers)
    words = numbers.view(len(numbers), PANEL, -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    num_panels, num_groups = words.shape[:2]
    own = (weight.scales, weight.minima)
    parts = [_interleaved(one).view(num_panels, num_groups, -1) for one in own if one is not None]
    if weight.bits < 8:
        parts += [one.flatten(2) for one in _low_and_high(words, weight.bits)]
    else:
        parts.append(words.flatten(2))
    if weight.scale_factors is None:
        return torch.cat(parts, dim=2).flatten(1)
    shared = (weight.scale_factors, weight.minimum_factors)
    outer = [
        _interleaved(one).view(num_panels, num_groups // NESTED_GROUPS, -1)
        for one in shared
        if one is not None
    ]
    groups = [one.view(num_panels, -1, NESTED_GROUPS, one.shape[2]) for one in parts]
    return torch.cat((*outer, torch.cat(groups, dim=3).flatten(2)), dim=2).flatten(1)


def _low_and_high(words: torch.Tensor, bits: int) -> Iterator[torch.Tensor]:
    """The words of the high bits, if there are any, and then those of the low four bits.

    Args:
        words: [panels, groups, 8, outputs of a panel, 4], numbers of fewer than 8 bits.
        bits: of a number.
    """
    num_high = bits - 4
    if num_high > 0:
        by_word = (words >> 4).view(*words.shape[:2], num_high, -1, *words.shape[3:])
        places = num_high * torch.arange(by_word.shape[3], dtype=torch.uint8)
        yield (by_word << places[:, None, None]).sum(dim=3, dtype=torch.uint8)
    yield words[:, :, ::2] & 15 | words[:, :, 1::2] << 4


def _interleaved(factors: torch.Tensor) -> torch.Tensor:
    """[outputs, columns] as the bytes of [panels, columns, outputs of a panel]."""
    return _padded(factors).transpose(1, 2).contiguous().view(torch.uint8)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, columns] as [panels, outputs of a panel, columns], padded with zeros."""
    padding = rows.new_zeros(-len(rows) % PANEL, rows.shape[1])
    return torch.cat((rows, padding)).view(-1, PANEL, rows.shape[1])
