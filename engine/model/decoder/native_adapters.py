"""Packs adapters for the kernels, product by product (see kernels/adapters.h)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.model.causal_model import StepInputs
from engine.model.decoder.decoder_adapters import PRODUCTS, Addition, DecoderAdapter
from engine.model.decoder.decoder_weights import DecoderWeights, Linear
from engine.model.kernels.library import AdditionStruct
from engine.model.kernels.packing import LANES, PER_WORD, interleave, pack

#: Copies a tensor to permanent memory and returns its address.
Keep = Callable[[torch.Tensor], int]


class PackedAdapters:
    """All adapters of a decoder, packed, and their indices in the kernels' table."""

    def __init__(
        self, weights: DecoderWeights, adapters: Sequence[DecoderAdapter], keep: Keep
    ) -> None:
        self._number_of = {adapter.name: number for number, adapter in enumerate(adapters)}
        size = len(adapters) * len(weights.layers) * len(PRODUCTS)
        #: [adapters][layers][products], flat.
        self.table = (AdditionStruct * size)(
            *(
                _packed(additions.get(name, ()), getattr(layer, name), name, keep)
                for adapter in adapters
                for layer, additions in zip(weights.layers, adapter.layers, strict=True)
                for name in PRODUCTS
            )
        )

    def __len__(self) -> int:
        return len(self._number_of)

    def numbers_of_tokens(self, inputs: StepInputs) -> torch.Tensor | None:
        """[tokens], the index of each token's adapter, or -1; None if no token has an adapter."""
        if not inputs.adapted:
            return None
        numbers = torch.full_like(inputs.token_ids, -1)
        for name, tokens in inputs.adapted:
            numbers[tokens] = self._number_of[name]
        return numbers


def _packed(
    additions: Sequence[Addition], linear: Linear | None, product: str, keep: Keep
) -> AdditionStruct:
    """The addition of one adapter to a product with `linear`; a struct of zeros for none.

    The parts of a fused product (such as queries, keys and values) are concatenated in `down`, each
    padded to whole words. A strip of outputs is multiplied only by the words of its own part.
    """
    if not additions:
        return AdditionStruct()
    assert linear is not None, "an adapter changes only layers that the model has"
    weight = linear.weight
    per_word = PER_WORD[weight.dtype]
    ends = np.cumsum([-(-part.rank // per_word) * per_word for _, part in additions]).tolist()
    rank = ends[-1]
    down, up = weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(len(weight), rank)
    scales = torch.zeros(-(-rank // LANES) * LANES)
    owns = torch.zeros(len(weight), rank, dtype=torch.bool)
    for (first, part), start, end in zip(additions, [0, *ends], ends, strict=False):
        down[start : start + part.rank] = part.down
        scales[start : start + part.rank] = part.scale
        outputs = slice(first, first + len(part.up))
        up[outputs, start : start + part.rank] = part.up
        owns[outputs, start:end] = True
    if product == "gate_up":
        up, owns = interleave(up), interleave(owns)
    ups = _packed_up(pack(up), owns[:, ::per_word], keep)
    words = {*ups[:, 2].tolist()}
    return AdditionStruct(
        down=keep(pack(down)),
        scales=keep(scales),
        ups=keep(ups),
        rank=rank,
        words=words.pop() if len(words) == 1 else -1,
    )


def _packed_up(strips: torch.Tensor, owns: torch.Tensor, keep: Keep) -> torch.Tensor:
    """[strips, 3]: address, first word and number of words of each strip, as in QuireUp.

    Args:
        strips: [strips, words, 16 outputs, elements of a word].
        owns: [outputs, words], True for the words of an output's own part; all others are zero.
        keep: stores the words of each strip that are multiplied.
    """
    padding = owns.new_zeros(-len(owns) % LANES, owns.shape[1])
    words = torch.cat((owns, padding)).view(len(strips), LANES, -1).any(dim=1).int()
    first = words.argmax(dim=1)
    last = torch.where(words.any(dim=1), words.shape[1] - words.flip(1).argmax(dim=1), 0)
    ups = torch.stack((torch.zeros_like(first), first, last - first), dim=1)
    # Strips with the same range of words are stored together; there are few different ranges.
    for begin, end in {*zip(first.tolist(), last.tolist(), strict=True)} - {(0, 0)}:
        index = ((first == begin) & (last == end)).nonzero()[:, 0]
        chosen = strips[index, begin:end].contiguous()
        size = chosen[0].nbytes
        ups[index, 0] = keep(chosen) + size * torch.arange(len(index))
    return ups
