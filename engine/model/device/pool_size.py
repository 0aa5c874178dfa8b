"""How many blocks a KV pool gets: as told, or what the memory really free after the weights holds.

Knows no device but by how much is free on it, which is asked of `engine.model.device.memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import ModelRefused
from engine.model.device.kv_pool import LayerShape, bytes_per_block, num_blocks_for
from engine.model.kernels.packing import LANES

#: Tensors of a step that are alive at once at most, when memory is set aside for them: so many as
#: wide as what goes from layer to layer, and so many as wide as the widest between two products.
LIVE_HIDDEN = 10
LIVE_WIDE = 4
#: Copies of the logits that are alive at most, in float32 equivalents: ten in the sampler, two
#: that the step before keeps until its tokens are settled, and one that captured steps write to.
LIVE_LOGITS = 13
#: Tensors as wide as the widest that are alive beside those where adapters add to a product: their
#: tokens gathered, and what is added, which may be of two such layers in one.
LIVE_ADAPTED = 3
#: Numbers alive for each of an adapter's rank: of three parts of a product beside each other, or
#: before and after they are scaled. Whole strips are computed.
LIVE_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step there can be, by which memory is set aside.

    Args:
        num_logits: tokens to choose, and so rows of logits.
        width: as in `TransformersModel`.
        dtype: of the activations.
        max_rank: the largest of any adapter, in any layer; 0 where there are no adapters.
    """

    num_tokens: int
    num_logits: int
    hidden_size: int
    width: int
    vocab_size: int
    dtype: torch.dtype
    max_rank: int = 0

    @property
    def nbytes(self) -> int:
        """What the activations and the logits of such a step take at most."""
        of_token = LIVE_HIDDEN * self.hidden_size + LIVE_WIDE * self.width
        if self.max_rank:
            of_token += LIVE_ADAPTED * self.width + LIVE_RANKS * max(self.max_rank, LANES)
        activations = of_token * self.num_tokens * self.dtype.itemsize
        logits = LIVE_LOGITS * self.num_logits * self.vocab_size * torch.float32.itemsize
        return activations + logits


def blocks_in(
    memory_bytes: int, shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype
) -> int:
    """Blocks that fit in `memory_bytes`, at least one.

    Raises:
        ModelRefused: there is no room for one; the message has both numbers.
    """
    fitting = num_blocks_for(memory_bytes, shapes, block_size=block_size, dtype=dtype)
    if fitting < 1:
        size = bytes_per_block(shapes, block_size=block_size, dtype=dtype)
        raise ModelRefused(
            f"{memory_bytes} bytes are left for the KV cache, and one block takes {size}"
        )
    return fitting


def memory_for_blocks(free_bytes: int, step: StepSize, *, share: float) -> int:
    """Bytes a pool may take of `free_bytes`: a share of what the largest step leaves."""
    return int((free_bytes - step.nbytes) * share)


def useful_blocks(*, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """As many as requests of full length could use at once; more could only keep old prefixes."""
    return max_num_seqs * -(-max_model_len // block_size)
