"""The common decoder with one fused Triton kernel between each two matrix products.

The number of kernels determines the time of a step with few rows: here a layer launches ten, the
two of a captured attention included, instead of nearly forty. Knows no model family; it computes
the same as `Decoder`.
"""

from collections.abc import Sequence

import torch

from engine.model.causal_model import StepInputs
from engine.model.decoder.decoder import Angles, Decoder, scaled
from engine.model.decoder.decoder_adapters import DecoderAdapter
from engine.model.decoder.decoder_config import DecoderConfig, NotSupported
from engine.model.decoder.decoder_weights import DecoderWeights
from engine.model.device.kv_pool import KVPool
from engine.model.device.launcher import Launcher
from engine.model.kernels.build import KernelsUnavailable

#: Elements of one token per program (thread block) of the activation kernel.
ACTIVATED = 1024
#: Numbers of half heads per program of the kernel that stores heads: in half precision, sixteen
#: bytes for each of its 64 threads.
STORED = 512
#: Hidden size above which a norm uses eight warps instead of four.
MANY = 2048


class FusedDecoder(Decoder):
    """`Decoder` on a device for which Triton has a compiler.

    Raises:
        NotSupported: the model has norms or activations that the kernels do not compute, or no
            rotary embedding.
        KernelsUnavailable: Triton is not installed. `forward` also raises it: Triton cannot compile
            its kernels here.
    """

    name = "decoder-triton"

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: Sequence[DecoderAdapter] = (),
    ) -> None:
        first = weights.layers[0]
        has_post_norms = first.attention_norm is None or first.attention_post_norm is not None
        if config.family.norms_whole_projections or has_post_norms:
            raise NotSupported("its norms over all heads or after a block are not fused")
        if not config.rotaries:
            raise NotSupported("heads without a rotary embedding are not fused")
        if config.family.norms_round_once or config.activation != "silu":
            raise NotSupported("its norms in float32 or its activations are not fused")
        super().__init__(config, weights, adapters)
        try:
            from engine.model.decoder import fused_kernels
        except ImportError as error:
            raise KernelsUnavailable(f"Triton is not installed: {error}") from error
        self._launch = Launcher(fused_kernels)

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        factor = self.config.residual_multiplier
        hidden, rotaries = self._begin(inputs)
        added: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            hidden, normed = self._add_and_norm(hidden, added, layer.attention_norm)
            mixed = self._mix(index, normed, inputs, kv_pool, rotaries[index])
            hidden, normed = self._add_and_norm(hidden, scaled(mixed, factor), layer.mlp_norm)
            added = scaled(self._mlp(index, normed, inputs), factor)
        assert added is not None
        return self._end(hidden + added, inputs)

    def _store(
        self,
        index: int,
        projected: torch.Tensor,
        inputs: StepInputs,
        kv_pool: KVPool,
        angles: Angles,
    ) -> torch.Tensor:
        config, layer = self.config, self._weights.layers[index]
        query = projected.new_empty(len(projected), config.num_heads, config.head_dim)
        half = power_of_two(config.rotary_dim // 2)
        at_once = max(1, STORED // half)
        groups = -(-config.num_heads // at_once) + 2 * -(-config.num_kv_heads // at_once)
        blocks, offsets = inputs.slots.blocks, inputs.slots.offsets
        norms = layer.query_norm is not None
        self._launch(
            "store_heads",
            (len(projected), groups),
            projected,
            # The kernel needs a pointer, but does not read it without norms.
            layer.query_norm if norms else projected,
            layer.key_norm if norms else projected,
            *angles,
            blocks,
            offsets,
            query,
            kv_pool.key_cache(index),
            kv_pool.value_cache(index),
            config.epsilon,
            blocks.stride(0),
            offsets.stride(0),
            HEADS=config.num_heads,
            KV_HEADS=config.num_kv_heads,
            DIM=config.head_dim,
            HALF=config.rotary_dim // 2,
            PADDED_HALF=half,
            PADDED_REST=power_of_two(max(1, config.head_dim - config.rotary_dim)),
            AT_ONCE=at_once,
            BLOCK_SIZE=kv_pool.block_size,
            NORMS=norms,
            ROTATES=config.rotary_of[index] is not None,
            num_warps=2,
        )
        return query

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        size = gate_up.shape[1] // 2
        active = gate_up.new_empty(len(gate_up), size)
        self._launch(
            "activate",
            (len(gate_up), -(-size // ACTIVATED)),
            gate_up,
            active,
            SIZE=size,
            TILE=ACTIVATED,
        )
        return active

    def _add_and_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden + added`, and the norm of that sum."""
        normed, size = torch.empty_like(hidden), hidden.shape[1]
        summed = hidden if added is None else torch.empty_like(hidden)
        self._launch(
            "add_and_norm",
            (len(hidden),),
            hidden,
            hidden if added is None else added,
            weight,
            summed,
            normed,
            self.config.epsilon,
            SIZE=size,
            PADDED=power_of_two(size),
            ADDS=added is not None,
            num_warps=8 if size > MANY else 4,
        )
        return summed, normed


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()
