"""The portable form of the fast path: the common decoder in torch operations, on any device.

Knows no model family: `DecoderConfig` has all differences between families. The compiled forms are
compared with this one, and it serves where they cannot be built.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as functional

from engine.model.causal_model import StepInputs
from engine.model.decoder.decoder_adapters import DecoderAdapter
from engine.model.decoder.decoder_config import Activation, DecoderConfig, NotSupported
from engine.model.decoder.decoder_weights import (
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    Linear,
)
from engine.model.device.kv_pool import KVPool
from engine.model.kernels.recurrent import recurrent_kernels
from engine.model.wide.mixers import functions, gated_delta_net, mamba2
from engine.model.wide.mixers.layer_state import LayerState
from engine.model.wide.mixers.mamba2 import StateSpace
from engine.model.wide.mixers.short_convolution import gated_convolution

#: Cosines and sines, [tokens, 1, rotary_dim / 2].
Angles = tuple[torch.Tensor, torch.Tensor]
ACTIVATE: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class Decoder:
    """The common decoder. It rounds at the same points as the models of transformers.

    Raises:
        NotSupported: the model has experts or a recurrent state, and the device is no CPU. Which
            experts a step uses decides which products it launches, and its requests decide which
            states it reads, so it could not be captured.
    """

    name = "decoder-torch"
    #: True because it uses the attention backend, and some backends read whole blocks.
    reads_unwritten_slots = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: Sequence[DecoderAdapter] = (),
    ) -> None:
        if weights.embedding.device.type != "cpu":
            if config.experts is not None:
                raise NotSupported("its experts are computed by this form on a CPU only")
            if config.state_shapes:
                raise NotSupported("its recurrent state is computed by this form on a CPU only")
        self.config = config
        self._adapters = {adapter.name: adapter.layers for adapter in adapters}
        self.vocab_size = config.vocab_size
        #: The number of experts that each token uses; the check at load lets it use all.
        self.num_chosen = 0 if config.experts is None else config.experts.num_chosen
        self.layer_shapes, self.state_shapes = config.layer_shapes, config.state_shapes
        self._places = config.places
        self.embedding = weights.embedding
        self._weights = weights
        device = weights.embedding.device
        self._frequencies = [one.inverse_frequencies.to(device) for one in config.rotaries]
        # The same as on the wide path. In float16 this form serves where there is a compiler, too.
        self._kernels = recurrent_kernels(device) if config.state_shapes else None
        #: Part of the engine's fingerprint; None if it has no kernels of ours.
        self.build: str | None = None
        if self._kernels is not None:
            self.name, self.build = f"{self.name}-{self._kernels.name}", self._kernels.build

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        factor = self.config.residual_multiplier
        hidden, rotaries = self._begin(inputs)
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            mixed = self._mix(index, normed, inputs, kv_pool, rotaries[index])
            mixed = self._norm(mixed, layer.attention_post_norm)
            hidden = hidden + scaled(mixed, factor)
            activated = self._mlp(index, self._norm(hidden, layer.mlp_norm), inputs)
            activated = self._norm(activated, layer.mlp_post_norm)
            hidden = hidden + scaled(activated, factor)
        return self._end(hidden, inputs)

    def _begin(self, inputs: StepInputs) -> tuple[torch.Tensor, Sequence[Angles]]:
        """The input of the first layer, and the rotary angles of each layer."""
        config = self.config
        hidden = functional.embedding(inputs.token_ids, self._weights.embedding)
        hidden = scaled(hidden, config.embedding_multiplier)
        found = []
        for rotary, frequencies in zip(config.rotaries, self._frequencies, strict=True):
            angles = inputs.positions[:, None].float() * frequencies
            cosines, sines = (
                (function(angles) * rotary.scaling).to(hidden.dtype)[:, None]
                for function in (torch.cos, torch.sin)
            )
            found.append((cosines, sines))
        # A layer without rotation does not use its angles.
        found = found or [(hidden, hidden)]
        return hidden, [found[index or 0] for index in config.rotary_of]

    def _end(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """The logits of the tokens to sample, after the last layer."""
        hidden = self._norm(hidden[inputs.logit_rows], self._weights.final_norm)
        logits, divisor = _linear(hidden, self._weights.head), self.config.logits_divisor
        logits = logits if divisor == 1.0 else logits / divisor
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _mix(
        self,
        index: int,
        hidden: torch.Tensor,
        inputs: StepInputs,
        kv_pool: KVPool,
        angles: Angles,
    ) -> torch.Tensor:
        """The output of a layer's mixer."""
        projected = self._linear(index, "projection", hidden, inputs)
        if self.config.mixers[index] == "attention":
            mixed = self._attend(index, projected, inputs, kv_pool, angles)
        else:
            rows, states = inputs.recurrent, kv_pool.states
            assert rows is not None and states is not None, "the pool is made for this model"
            state = LayerState(states.layer(self._places[index]), rows, self._kernels)
            mixed = self._recur(self._weights.layers[index], projected, state)
        return self._linear(index, "output", mixed, inputs)

    def _recur(
        self, layer: LayerWeights, projected: torch.Tensor, state: LayerState
    ) -> torch.Tensor:
        """The output of a mixer with a state, before its last product."""
        if layer.convolution is not None:
            return gated_convolution(projected, layer.convolution, state)
        sizes, weights = self.config.recurrence, layer.recurrence
        assert sizes is not None and weights is not None, "no other mixer has a state"
        num_heads, groups = sizes.num_heads, sizes.num_key_heads
        if isinstance(weights.rule, StateSpace):
            parts = [sizes.output_size, sizes.channels, num_heads]
            gate, mixed, step_sizes = torch.split(projected, parts, dim=-1)
            outputs = mamba2.scan(
                mixed,
                step_sizes,
                weights.rule,
                state,
                num_groups=groups,
                state_size=sizes.key_dim,
            )
            gated = (outputs.float() * functions.silu(gate.float())).view(len(gate), groups, -1)
            normed = functional.rms_norm(gated, gated.shape[-1:], eps=self.config.epsilon)
            return weights.norm * normed.flatten(1).to(outputs.dtype)
        parts = [sizes.channels, sizes.output_size, num_heads, num_heads]
        mixed, gate, strength, decay = torch.split(projected, parts, dim=-1)
        gate = gate.reshape(len(gate), num_heads, sizes.value_dim)
        outputs = gated_delta_net.recurred(
            gated_delta_net.Projected(mixed, gate, strength, decay),
            weights.rule,
            state,
            num_key_heads=groups,
        )
        normed = self._norm(outputs, weights.norm)
        return (normed * functions.silu(gate.float())).to(normed.dtype).flatten(1)

    def _attend(
        self,
        index: int,
        projected: torch.Tensor,
        inputs: StepInputs,
        kv_pool: KVPool,
        angles: Angles,
    ) -> torch.Tensor:
        place = self._places[index]
        attended = inputs.attention(
            self._store(index, projected, inputs, kv_pool, angles),
            kv_pool.key_cache(place),
            kv_pool.value_cache(place),
            scaling=self.config.scaling,
            sliding_window=self.config.windows[index],
            softcap=self.config.softcap,
            sinks=self._weights.layers[index].sinks,
        )
        attended = attended.flatten(1)
        if not self.config.family.gates_attention:
            return attended
        return attended * torch.sigmoid(self._queries(projected)[:, :, 1].flatten(1))

    def _queries(self, projected: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, 1, head_dim], or with gates [tokens, heads, 2, head_dim]."""
        config = self.config
        queries = projected[:, : config.query_size]
        return queries.view(len(queries), config.num_heads, -1, config.head_dim)

    def _store(
        self,
        index: int,
        projected: torch.Tensor,
        inputs: StepInputs,
        kv_pool: KVPool,
        angles: Angles,
    ) -> torch.Tensor:
        """Write keys and values to their slots; return the queries, [tokens, heads, head_dim]."""
        config, layer = self.config, self._weights.layers[index]
        keys = config.num_kv_heads * config.head_dim
        _, key, value = torch.split(projected, [config.query_size, keys, keys], dim=-1)
        query = self._queries(projected)[:, :, 0].flatten(1)
        if config.family.norms_whole_projections:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        query, key, value = (
            part.reshape(len(part), -1, config.head_dim) for part in (query, key, value)
        )
        if not config.family.norms_whole_projections:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        if config.rotary_of[index] is not None:
            query, key = _rotate(query, *angles), _rotate(key, *angles)
        kv_pool.write(self._places[index], key=key, value=value, slots=inputs.slots)
        return query

    def _mlp(self, index: int, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        layer = self._weights.layers[index]
        mixed = None if layer.experts is None else self._mix_experts(layer.experts, hidden)
        if mixed is not None and layer.gate_up is None:
            return mixed
        gate_up = self._linear(index, "gate_up", hidden, inputs)
        outputs = self._linear(index, "down", self._activate(gate_up), inputs)
        return outputs if mixed is None else mixed + outputs

    def _mix_experts(self, experts: ExpertWeights, hidden: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts, in ascending order."""
        options = self.config.experts
        assert options is not None, "read_weights found the experts of the config"
        shares = torch.softmax(_linear(hidden, experts.router), dim=-1, dtype=torch.float32)
        weights, chosen = shares.topk(self.num_chosen, dim=-1)
        if options.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(hidden)
        for expert in sorted({*chosen.flatten().tolist()}):
            tokens, choices = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = experts.of(expert)
            outputs = _linear(self._activate(_linear(hidden[tokens], gate_up)), down)
            weighted = outputs * weights[tokens, choices, None]
            mixed.index_add_(0, tokens, weighted.to(hidden.dtype))
        return mixed

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.config.swiglu is not None:
            alpha, limit = self.config.swiglu
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * torch.sigmoid(gate * alpha))
        return ACTIVATE[self.config.activation](gate) * up

    def _linear(
        self, index: int, product: str, hidden: torch.Tensor, inputs: StepInputs
    ) -> torch.Tensor:
        """A linear layer of decoder layer `index`, plus the additions of the step's adapters."""
        outputs = _linear(hidden, getattr(self._weights.layers[index], product))
        for adapter, tokens in inputs.adapted:
            for first, part in self._adapters[adapter][index].get(product, ()):
                added = part.added(hidden[tokens])
                outputs[:, first : first + added.shape[1]].index_add_(0, tokens, added)
        return outputs

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm over the last dimension, computed in float32; without a weight, no norm.

        A float32 weight multiplies before the result is rounded, another one after that, as in the
        models of transformers. On a GPU torch's norm is one kernel.
        """
        if weight is None:
            return hidden
        size, epsilon = hidden.shape[-1:], self.config.epsilon
        if weight.dtype != hidden.dtype:
            normed = functional.rms_norm(hidden.to(weight.dtype), size, weight, epsilon)
            return normed.to(hidden.dtype)
        return weight * functional.rms_norm(hidden, size, eps=epsilon)


def scaled(hidden: torch.Tensor, factor: float) -> torch.Tensor:
    """`hidden * factor`; launches no kernel for a factor of 1, which most families have."""
    return hidden if factor == 1.0 else hidden * factor


def _linear(inputs: torch.Tensor, linear: Linear) -> torch.Tensor:
    return functional.linear(inputs, linear.weight, linear.bias)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + half) of [tokens, heads, dim] by the angles of their positions."""
    half = cosines.shape[-1]
    first, second, rest = torch.split(heads, [half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat(
        (first * cosines - second * sines, second * cosines + first * sines, rest), dim=-1
    )
