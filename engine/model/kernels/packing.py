"""Packs matrices for the kernels in strips of 16 outputs, see kernels/multiply.h."""

import torch

#: Outputs of a strip; LANES in kernels/vector.h.
LANES = 16
#: Elements per 32-bit word, the unit of the kernels' sizes.
PER_WORD = {torch.float32: 1, torch.bfloat16: 2}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] as strips: [strips, words of the inputs, 16 outputs, elements of a word].

    The last strip is filled up with zeros.
    """
    outputs, inputs = weight.shape
    per_word = PER_WORD[weight.dtype]
    padding = weight.new_zeros(-outputs % LANES, inputs)
    strips = torch.cat((weight, padding)) if len(padding) else weight
    return strips.view(-1, LANES, inputs // per_word, per_word).transpose(1, 2).contiguous()


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """[gates, then ups] in turns of 16 rows, each half filled up with zeros to whole turns."""
    halves = gate_up.view(2, -1, gate_up.shape[1])
    padding = halves.new_zeros(2, -halves.shape[1] % LANES, gate_up.shape[1])
    turns = torch.cat((halves, padding), dim=1).view(2, -1, LANES, gate_up.shape[1])
    return turns.transpose(0, 1).reshape(-1, gate_up.shape[1])
