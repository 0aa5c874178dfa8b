"""How many blocks a KV pool gets from a number of bytes, and how many bytes a step leaves for it.

Knows no device: `engine.model.device.memory` measures the free memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.errors import ModelRefused
from engine.model.device.kv_pool import LayerShape, bytes_per_block, num_blocks_for
from engine.model.kernels.packing import LANES

#: The most tensors of a step that are alive at once, for which memory is reserved: of the hidden
#: size, and of the largest width between two products of a layer.
LIVE_HIDDEN = 10
LIVE_WIDE = 4
#: The most copies of the logits that are alive at once, counted in float32: nine in the sampler,
#: two that the previous step keeps until its tokens are settled, and the output of captured steps.
LIVE_LOGITS = 12
#: The same for the logits of scored tokens: as the model gave them, in single precision, and their
#: log-probabilities.
LIVE_SCORED = 3
#: Additional tensors of the largest width while adapters add to a product: their gathered tokens,
#: and the additions, which may be those of two linear layers in a fused product.
LIVE_ADAPTED = 3
#: Values per token that are alive for each rank of an adapter: for up to three parts of a fused
#: product, before and after scaling. The kernels compute whole strips of ranks.
LIVE_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The size of the largest possible step, for which memory is reserved.

    Args:
        num_logits: the number of tokens to sample.
        num_scored: the number of tokens of prompts whose log-probabilities are computed.
        width: as in `TransformersModel`.
        dtype: of the activations.
        max_rank: the largest rank of any adapter in any layer; 0 without adapters.
    """

    num_tokens: int
    num_logits: int
    hidden_size: int
    width: int
    vocab_size: int
    dtype: torch.dtype
    max_rank: int = 0
    num_scored: int = 0

    @property
    def nbytes(self) -> int:
        """The most bytes that activations and logits of the step take."""
        of_token = LIVE_HIDDEN * self.hidden_size + LIVE_WIDE * self.width
        if self.max_rank:
            of_token += LIVE_ADAPTED * self.width + LIVE_RANKS * max(self.max_rank, LANES)
        activations = of_token * self.num_tokens * self.dtype.itemsize
        num_rows = LIVE_LOGITS * self.num_logits + LIVE_SCORED * self.num_scored
        logits = num_rows * self.vocab_size * torch.float32.itemsize
        return activations + logits


def blocks_in(
    memory_bytes: int, shapes: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype
) -> int:
    """Blocks that fit in `memory_bytes`, at least one.

    Raises:
        ModelRefused: not one block fits; the message has both numbers.
    """
    fitting = num_blocks_for(memory_bytes, shapes, block_size=block_size, dtype=dtype)
    if fitting < 1:
        size = bytes_per_block(shapes, block_size=block_size, dtype=dtype)
        raise ModelRefused(
            f"{memory_bytes} bytes are left for the KV cache, and one block takes {size}"
        )
    return fitting


class EncoderMemory(NamedTuple):
    """The most bytes that encoding a picture takes, and those of outputs that are kept."""

    encoding_bytes: int
    kept_bytes: int


#: That of a model which reads no pictures.
NO_ENCODER = EncoderMemory(0, 0)


def memory_for_blocks(
    free_bytes: int, step: StepSize, *, share: float, encoder: EncoderMemory = NO_ENCODER
) -> int:
    """Bytes that a pool may take of `free_bytes`: a share of what the largest step leaves free.

    A step encodes its pictures one after the other, before it computes its tokens.
    """
    largest = max(step.nbytes, encoder.encoding_bytes)
    return int((free_bytes - largest - encoder.kept_bytes) * share)


def useful_blocks(*, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks that requests of full length can use at once; more would only cache old prefixes."""
    return max_num_seqs * -(-max_model_len // block_size)
