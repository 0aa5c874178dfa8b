"""The wide path: any transformers decoder that dispatches attention through the AttentionInterface.

Knows no architecture. One attention function is registered under our name; the model's own forward
pass runs on the flattened step as a batch of one, and every time a layer attends, the step that is
active in this context stores the keys and values and attends through the block tables. Any number
of models may live in one process: what is registered only looks up the active step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.model.adapters import Adapter
from engine.model.attention.interface import AttentionNeeds
from engine.model.causal_model import StepInputs
from engine.model.device.kv_pool import KVPool, LayerShape
from engine.model.wide.wide_adapters import AdapterHooks

#: What `attn_implementation` is set to. No mask function is registered under this name, and for
#: such a name transformers makes no mask at all: the block tables and the layer's window say what
#: is seen.
ATTENTION_NAME = "quire_paged"
#: The same attention function, with a mask function beside it: `engine.model.checks.probe` wants to
#: see the masks that a model would have made.
PROBE_NAME = "quire_probe"
#: Config fields for the number of experts per token; all experts' matrices are in one tensor.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk")


class AttentionRecipient(Protocol):
    """Whoever answers for the attention of the forward pass that is running."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """[1, tokens, heads, value_dim] from [1, heads, tokens, dim]; `options` are the model's."""
        ...

    def mask(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        """The mask the model hands on to its layers; asked for under `PROBE_NAME` only."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attending layer, as the probe found it.

    Args:
        module: the module that calls the attention function.
        shape: what it keeps of a token.
        sliding_window: tokens it sees, itself included; None for all.
        num_heads: of its queries.
        softcap: of its scores; None when they are not capped.
    """

    module: nn.Module
    shape: LayerShape
    sliding_window: int | None
    num_heads: int
    softcap: float | None


class TransformersModel:
    """A transformers model behind the runner's interface.

    Args:
        model: loaded with `attn_implementation=ATTENTION_NAME`, in evaluation mode.
        layers: in the order the model calls them, from `engine.model.checks.probe`.
        vocab_size: width of the logits.
        selects_logits: the model's forward takes `logits_to_keep`, so that the vocabulary is not
            multiplied out for tokens that nobody samples from.
    """

    name = "transformers"
    #: It uses the attention backend, and some backends read whole blocks.
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
        self._selects_logits = selects_logits
        self._adapters = AdapterHooks(model, ())

    def add_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Add adapters, which are then used where a step asks for them; called once."""
        self._adapters = AdapterHooks(self.model, adapters)

    @property
    def windows(self) -> list[int]:
        """Keys that a token sees, itself included, in the layers where it does not see all."""
        return [one.sliding_window for one in self.layers if one.sliding_window is not None]

    @property
    def attention_needs(self) -> AttentionNeeds:
        """What its layers ask of an attention backend."""
        largest = max(self.layers, key=lambda layer: layer.num_heads * layer.shape.key_dim)
        return AttentionNeeds(
            heads=largest.num_heads,
            kv_heads=largest.shape.kv_heads,
            key_dim=largest.shape.key_dim,
            value_dim=largest.shape.value_dim,
            has_window=any(layer.sliding_window is not None for layer in self.layers),
            has_softcap=any(layer.softcap is not None for layer in self.layers),
        )

    @property
    def width(self) -> int:
        """The most elements of one token between two matrix products of a layer.

        The width of its MLP, or of all the experts that the token uses; or of its queries, keys and
        values together.
        """
        config = self.model.config.get_text_config()
        names = (name for name in EXPERTS_PER_TOKEN if hasattr(config, name))
        num_experts = getattr(config, next(names, ""), 1)
        # The last dimension is what goes into a product, and in some families what comes out.
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

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        options = {"logits_to_keep": inputs.logit_rows} if self._selects_logits else {}
        paged = _PagedStep(self._layer_of, inputs, kv_pool)
        with answering(paged), self._adapters.active(inputs):
            output = self.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                return_dict=True,
                **options,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_logits else logits[inputs.logit_rows]


class _PagedStep:
    """One forward pass over the pool."""

    def __init__(
        self,
        layer_of: Mapping[nn.Module, tuple[int, AttentionLayer]],
        inputs: StepInputs,
        kv_pool: KVPool,
    ) -> None:
        self._layer_of = layer_of
        self._inputs = inputs
        self._kv_pool = kv_pool

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        assert mask is None, "no mask was made, so none can arrive"
        index, layer = self._layer_of[module]
        # [1, heads, tokens, dim] is how models keep them; the cache and the backends count tokens
        # first.
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        self._kv_pool.write(index, key=key, value=value, slots=self._inputs.slots)
        return self._inputs.attention(
            query,
            self._kv_pool.key_cache(index),
            self._kv_pool.value_cache(index),
            scaling=scaling_of(options, query),
            sliding_window=layer.sliding_window,
            softcap=options.get("softcap"),
        )[None]

    def mask(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        raise AssertionError(f"no mask is made under {ATTENTION_NAME}: {options}")


def scaling_of(options: Mapping[str, Any], query: torch.Tensor) -> float:
    """The layer's factor on the scores; 1/sqrt(dim), as in torch, when it names none."""
    scaling = options.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


_recipient: ContextVar[AttentionRecipient] = ContextVar("quire_attention_recipient")


@contextmanager
def answering(recipient: AttentionRecipient) -> Iterator[None]:
    """Let `recipient` answer for every attention call made in this context."""
    token = _recipient.set(recipient)
    try:
        yield
    finally:
        _recipient.reset(token)


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _recipient.get().attend(module, query, key, value, attention_mask, options), None


def _mask_function(**options: Any) -> torch.Tensor | None:
    return _recipient.get().mask(options)


# Process-wide registers of transformers: the functions hold no state, so registering once is
# enough.
AttentionInterface.register(ATTENTION_NAME, _attention_function)
AttentionInterface.register(PROBE_NAME, _attention_function)
AttentionMaskInterface.register(PROBE_NAME, _mask_function)
