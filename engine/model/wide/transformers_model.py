"""The wide path: any transformers decoder that dispatches attention through the AttentionInterface.

Knows no architecture. The model's own forward pass runs on the flattened step as a batch of one. It
calls the attention function that we register with transformers; this function calls the step that
is active in the current context, which stores the keys and values and attends through the block
tables. A process may have any number of models, since the registered function has no state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.model.adapters import Adapter
from engine.model.attention.interface import AttentionNeeds
from engine.model.attention.self_check import ANY_NEEDS
from engine.model.causal_model import StepInputs
from engine.model.device.kv_pool import KVPool, LayerShape
from engine.model.kernels.recurrent import RecurrentKernels, recurrent_kernels
from engine.model.wide.mixers import mixers_in
from engine.model.wide.mixers.interface import Mixed, Mixer
from engine.model.wide.mixers.layer_state import LayerState
from engine.model.wide.picture_reader import PictureReader
from engine.model.wide.position_scales import (
    PositionScale,
    position_scale_of,
    without_own_scale,
)
from engine.model.wide.wide_adapters import AdapterHooks

#: The value of `attn_implementation`. No mask function is registered under this name, so
#: transformers builds no masks: the block tables and the layer's window determine which keys are
#: seen.
ATTENTION_NAME = "quire_paged"
#: The same attention function, with a mask function: `engine.model.checks.probe` needs the masks
#: that the model would build.
PROBE_NAME = "quire_probe"
#: The option with which models pass the sinks of a layer, [heads].
SINKS_OPTION = "s_aux"
#: Config fields for the number of experts per token; all experts' matrices are in one tensor.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk")


class AttentionHandler(Protocol):
    """Computes the attention calls of the forward pass that is running."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """[1, tokens, heads, value_dim] from [1, heads, tokens, dim]; the model sets `options`."""
        ...

    def mask(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        """The mask that the model passes to its layers; called only under `PROBE_NAME`."""
        ...

    def mix(self, module: nn.Module, hidden: torch.Tensor) -> Mixed | None:
        """What a mixer with a recurrent state returns, [1, tokens, ...].

        None if the module's own `forward` is to compute it.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer with attention, as found by the probe.

    Args:
        module: the module that calls the attention function.
        shape: the shape of its keys and values of one token.
        sliding_window: keys that a token sees, its own included; None for all.
        num_heads: number of query heads.
        softcap: the cap of its scores; None if they are not capped.
        has_sinks: whether its query heads have sinks, scores without a value.
    """

    module: nn.Module
    shape: LayerShape
    sliding_window: int | None
    num_heads: int
    softcap: float | None
    has_sinks: bool


class TransformersModel:
    """A transformers model behind the runner's interface.

    Args:
        model: loaded with `attn_implementation=ATTENTION_NAME`, in evaluation mode.
        layers: in the order of the model's calls, from `engine.model.checks.probe`.
        vocab_size: width of the logits.
        selects_logits: whether the model's forward has the parameter `logits_to_keep`, which avoids
            computing logits of tokens that are not sampled.
    """

    #: True because it uses the attention backend, and some backends read whole blocks.
    reads_unwritten_slots = True

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[AttentionLayer],
        *,
        vocab_size: int,
        selects_logits: bool,
    ) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.layer_shapes = tuple(layer.shape for layer in layers)
        self.vocab_size = vocab_size
        self._layer_of = {layer.module: (index, layer) for index, layer in enumerate(layers)}
        found = list(mixers_in(model))
        self.state_shapes = tuple(mixer.shapes(module) for module, mixer in found)
        self._mixer_of = {module: (index, mixer) for index, (module, mixer) in enumerate(found)}
        for module in self._mixer_of:
            module.forward = partial(_mix, module, module.forward)
        scales = {layer.module: position_scale_of(layer.module) for layer in layers}
        self._scales = {module: scale for module, scale in scales.items() if scale is not None}
        has_kernels = any(mixer.has_kernels for _, mixer in found)
        #: What updates recurrent states; None for torch.
        self.kernels = recurrent_kernels(model.device) if has_kernels else None
        self._selects_logits = selects_logits
        self._adapters = AdapterHooks(model, ())
        #: Reads the pictures of requests; None for a model without its encoder.
        self.picture_reader: PictureReader | None = None

    @property
    def name(self) -> str:
        """The path, and the form of its recurrences if it is not torch."""
        return "transformers" if self.kernels is None else f"transformers-{self.kernels.name}"

    @property
    def build(self) -> str | None:
        """Part of the engine's fingerprint; None if it has no kernels of ours."""
        return None if self.kernels is None else self.kernels.build

    def add_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Add adapters; steps use them by name. Call it once at most."""
        self._adapters = AdapterHooks(self.model, adapters)

    @property
    def windows(self) -> list[int]:
        """The sliding windows of all layers that have one: keys a token sees, itself included."""
        return [one.sliding_window for one in self.layers if one.sliding_window is not None]

    @property
    def attention_needs(self) -> AttentionNeeds:
        """The features that its layers need from an attention backend."""
        if not self.layers:
            return ANY_NEEDS
        largest = max(self.layers, key=lambda layer: layer.num_heads * layer.shape.key_dim)
        return AttentionNeeds(
            heads=largest.num_heads,
            kv_heads=largest.shape.kv_heads,
            key_dim=largest.shape.key_dim,
            value_dim=largest.shape.value_dim,
            has_window=any(layer.sliding_window is not None for layer in self.layers),
            has_softcap=any(layer.softcap is not None for layer in self.layers),
            has_sinks=any(layer.has_sinks for layer in self.layers),
        )

    @property
    def width(self) -> int:
        """The most elements of one token between two matrix products of a layer.

        This is the width of the MLP (or of all experts that a token uses), or that of queries, keys
        and values together.
        """
        num_experts = self._experts_per_token or 1
        # The last dimension is the input of a product, in some families its output.
        inner = (
            parameter.shape[-1] * (num_experts if parameter.dim() > 2 else 1)
            for parameter in self.model.parameters()
            if parameter.dim() > 1
        )
        heads = (
            layer.num_heads * layer.shape.key_dim
            + layer.shape.kv_heads * (layer.shape.key_dim + layer.shape.value_dim)
            for layer in self.layers
        )
        return max(*inner, *heads)

    @property
    def has_experts(self) -> bool:
        """Whether a router chooses some experts for each token."""
        return self._experts_per_token is not None

    @property
    def _experts_per_token(self) -> int | None:
        config = self.model.config.get_text_config()
        names = (name for name in EXPERTS_PER_TOKEN if hasattr(config, name))
        return getattr(config, next(names, ""), None)

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        options = {"logits_to_keep": inputs.logit_rows} if self._selects_logits else {}
        paged = _PagedStep(
            self._layer_of, self._scales, self._mixer_of, inputs, kv_pool, self.kernels
        )
        own_scale = without_own_scale(tuple(self._scales))
        given = {"input_ids": inputs.token_ids[None], "position_ids": inputs.positions[None]}
        if self.picture_reader is not None:
            given = self.picture_reader.arguments(inputs)
        with attention_handler(paged), self._adapters.active(inputs), own_scale:
            output = self.model(**given, use_cache=False, return_dict=True, **options)
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_logits else logits[inputs.logit_rows]


class _PagedStep:
    """The attention of one forward pass, over the pool."""

    def __init__(
        self,
        layer_of: Mapping[nn.Module, tuple[int, AttentionLayer]],
        scales: Mapping[nn.Module, PositionScale],
        mixer_of: Mapping[nn.Module, tuple[int, Mixer]],
        inputs: StepInputs,
        kv_pool: KVPool,
        kernels: RecurrentKernels | None,
    ) -> None:
        self._layer_of = layer_of
        self._scales = scales
        self._mixer_of = mixer_of
        self._inputs = inputs
        self._kv_pool = kv_pool
        self._kernels = kernels

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        assert mask is None, "no mask is built under ATTENTION_NAME"
        index, layer = self._layer_of[module]
        # From the models' layout [1, heads, tokens, dim] to that of cache and backends, tokens
        # first.
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if module in self._scales:
            query = self._scales[module].apply(query, self._inputs.positions)
        self._kv_pool.write(index, key=key, value=value, slots=self._inputs.slots)
        return self._inputs.attention(
            query,
            self._kv_pool.key_cache(index),
            self._kv_pool.value_cache(index),
            scaling=scaling_of(options, query),
            sliding_window=layer.sliding_window,
            softcap=options.get("softcap"),
            sinks=options.get(SINKS_OPTION),
        )[None]

    def mask(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        raise AssertionError(f"no mask is built under {ATTENTION_NAME}: {options}")

    def mix(self, module: nn.Module, hidden: torch.Tensor) -> Mixed:
        index, mixer = self._mixer_of[module]
        rows, states = self._inputs.recurrent, self._kv_pool.states
        assert rows is not None and states is not None
        state = LayerState(states.layer(index), rows, self._kernels)
        mixed = mixer.step(module, hidden[0], state)
        if isinstance(mixed, torch.Tensor):
            return mixed[None]
        return tuple(None if each is None else each[None] for each in mixed)


def scaling_of(options: Mapping[str, Any], query: torch.Tensor) -> float:
    """The layer's factor of the scores; by default 1/sqrt(dim), as in torch."""
    scaling = options.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


_handler: ContextVar[AttentionHandler | None] = ContextVar(
    "quire_attention_recipient", default=None
)


@contextmanager
def attention_handler(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` compute every attention call and every mixer in this context."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    handler = _handler.get()
    assert handler is not None
    return handler.attend(module, query, key, value, attention_mask, options), None


def _mask_function(**options: Any) -> torch.Tensor | None:
    handler = _handler.get()
    assert handler is not None
    return handler.mask(options)


def _mix(
    module: nn.Module,
    own: Callable[..., Mixed],
    hidden_states: torch.Tensor,
    *others: Any,
    **options: Any,
) -> Mixed:
    """The `forward` of a mixer: that of the handler, or else its own."""
    handler = _handler.get()
    mixed = None if handler is None else handler.mix(module, hidden_states)
    return own(hidden_states, *others, **options) if mixed is None else mixed


# The registries of transformers are global to the process. Registering once is enough, since the
# functions have no state.
AttentionInterface.register(ATTENTION_NAME, _attention_function)
AttentionInterface.register(PROBE_NAME, _attention_function)
AttentionMaskInterface.register(PROBE_NAME, _mask_function)
