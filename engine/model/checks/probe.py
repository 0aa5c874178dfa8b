"""Finds out how a transformers model attends; refuses features that paged attention would drop.

Knows no architecture by name. One forward pass over a few tokens shows which modules attend, which
keys and values they store per token, and which tokens they see: the mask function of each layer is
evaluated for positions up to the model's limit, so a window is found without a prompt of that
length. Mixers with a recurrent state are found by the names of their classes. A second check
compares the wide path (two packed prompts in two steps) with the model's own attention on each
prompt alone. It detects everything else that passes from token to token, such as another recurrent
state, or positions that ignore `position_ids`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from engine.errors import ModelRefused
from engine.model.attention.dense import additive, attend, visible
from engine.model.checks.own_attention import (
    PROBE_BLOCK_SIZE,
    TOLERANCES,
    attention_named,
    check_against_own_attention,
    computing,
    num_embeddings,
    probe_prompts,
    relative_errors,
)
from engine.model.checks.rehearsal import reference_rehearsal
from engine.model.device.kv_pool import LayerShape
from engine.model.wide.mixers import mixers_in
from engine.model.wide.stored_layers import shapes_only
from engine.model.wide.transformers_model import (
    PROBE_NAME,
    SINKS_OPTION,
    AttentionLayer,
    TransformersModel,
    attention_handler,
    scaling_of,
)

#: Mask functions are evaluated for all keys up to this position at most.
MAX_PROBED_POSITION = 1 << 20
#: About so many later keys are sampled.
NUM_SAMPLED_KEYS = 1 << 16

#: Options of an attention call that this engine computes ...
HONOURED_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", SINKS_OPTION})
#: ... and options that do not change the result here: there is no dropout, `is_causal` is checked
#: separately, and the others describe packing for other kernels or request additional outputs.
HARMLESS_OPTIONS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "deterministic",
        "logits_to_keep",
    }
)


def probe(
    model: PreTrainedModel, *, max_model_len: int, compares: bool = True
) -> TransformersModel:
    """Wrap a model for the runner; its layers are described by their calls in a forward pass.

    Args:
        model: loaded with `attn_implementation=ATTENTION_NAME`, in evaluation mode, on its device.
        max_model_len: a window of at least this length counts as no window.
        compares: whether `check_against_own_attention` is done as well.

    Raises:
        ModelRefused: names the feature that would have been dropped.
    """
    parameters = inspect.signature(model.forward).parameters
    has_mixers = next(mixers_in(model), None) is not None
    # Models of mixers alone have no positions, and ignore what they do not know.
    ignores_positions = has_mixers and "kwargs" in parameters
    if "position_ids" not in parameters and not ignores_positions:
        raise ModelRefused(
            f"{type(model).__name__} takes no position_ids, so tokens of several requests cannot "
            "be computed together"
        )
    recorder = _Recorder(max_model_len)
    tokens = probe_prompts(model)[0][None]
    probing = attention_named(model, PROBE_NAME), attention_handler(recorder), shapes_only()
    with computing(model), probing[0], probing[1], probing[2]:
        logits = model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=model.device)[None],
            use_cache=False,
            return_dict=True,
        ).logits
    if not has_mixers:
        _check_layer_count(model, recorder.layers)
    _check_cached_windows(model, recorder.layers, max_model_len)
    served = TransformersModel(
        model,
        recorder.layers,
        vocab_size=min(logits.shape[-1], num_embeddings(model)),
        selects_logits="logits_to_keep" in parameters,
    )
    if compares:
        check_against_own_attention(served)
    return served


def check_adapter(served: TransformersModel, adapter: str) -> None:
    """Check that prompts with and without an adapter have the same logits in one step as alone.

    Raises:
        ModelRefused: an adapted layer does not get each token exactly once, in order.
    """
    model = served.model
    prompts = [prompt.tolist() for prompt in probe_prompts(model)]
    rehearsal = reference_rehearsal(
        dtype=model.dtype, device=model.device, block_size=PROBE_BLOCK_SIZE
    )
    together = rehearsal.logits(
        served, prompts, [list(map(len, prompts))], adapters=(adapter, None)
    )
    for prompt, name, found in zip(prompts, (adapter, None), together, strict=True):
        (alone,) = rehearsal.logits(served, [prompt], [[len(prompt)]], adapters=(name,))
        error = float(relative_errors((found - alone).norm(dim=-1), alone).median())
        if not error <= TOLERANCES[model.dtype]:
            raise ModelRefused(
                f"{type(model).__name__} cannot be served with adapters: a prompt has other logits "
                f"beside another prompt than alone (off by {error:.1%})"
            )


class _Recorder:
    """Computes the attention calls of one prompt, and records each layer's call."""

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[AttentionLayer] = []
        self._max_model_len = max_model_len
        self._masks: list[tuple[torch.Tensor, int | None]] = []

    def mask(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        window = _window_of(
            options["mask_function"], self._max_model_len, torch.device(options["device"])
        )
        positions = torch.arange(int(options["q_length"]), device=options["device"])
        mask = additive(visible(positions, positions, window), options["dtype"])[None, None]
        self._masks.append((mask, window))
        return mask

    def mix(self, module: nn.Module, hidden: torch.Tensor) -> None:
        """Leave it to the module: its state is that of the one prompt."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        name = type(module).__name__
        if any(layer.module is module for layer in self.layers):
            raise ModelRefused(f"{name} attends more than once per token and layer")
        if options.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise ModelRefused(f"{name} looks at later tokens too; only causal attention is served")
        if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise ModelRefused(f"{name} attends to keys that are not those of its own tokens")
        self._check_options(name, options)
        shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        window = self._window(name, mask, options.get("sliding_window"))
        softcap, sinks = options.get("softcap"), options.get(SINKS_OPTION)
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ModelRefused(
                f"{name} has sinks of the shape {list(sinks.shape)}; only one sink for each query "
                "head is served"
            )
        self.layers.append(
            AttentionLayer(module, shape, window, query.shape[1], softcap, sinks is not None)
        )
        return attend(
            query,
            key,
            value,
            bias=mask,
            scaling=scaling_of(options, query),
            softcap=softcap,
            sinks=None if sinks is None else sinks[:, None, None],
        ).transpose(1, 2)

    @staticmethod
    def _check_options(name: str, options: Mapping[str, Any]) -> None:
        for option, value in options.items():
            known = option in HONOURED_OPTIONS or option in HARMLESS_OPTIONS
            if not known and value is not None and value is not False:
                raise ModelRefused(
                    f"{name} passes {option!r} to its attention, which this engine does not compute"
                )

    def _window(self, name: str, mask: torch.Tensor | None, option: int | None) -> int | None:
        """The layer's window, from its mask if it has one; the option must agree with it."""
        named = option if option is not None and option < self._max_model_len else None
        if mask is None:
            return named
        for made, window in self._masks:
            if mask.data_ptr() == made.data_ptr() and mask.shape[-2:] == made.shape[-2:]:
                if named not in (None, window):
                    raise ModelRefused(
                        f"{name} has a window of {named} tokens in its options, and of {window} "
                        "in its mask"
                    )
                return window
        raise ModelRefused(f"{name} changes its attention mask, which this engine does not compute")


def _window_of(
    mask_function: Callable[..., torch.Tensor], max_model_len: int, device: torch.device
) -> int | None:
    """The sliding window of a mask function; None if a token sees all earlier tokens.

    Raises:
        ModelRefused: the mask is neither causal nor a sliding window of fixed length.
    """
    limit = min(max_model_len, MAX_PROBED_POSITION)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    # Later keys are only sampled: a mask that is causal up to the limit may have chunks above it.
    end = min(max_model_len, 1 << 62)
    sampled = range(limit, end, max(1, (end - limit) // NUM_SAMPLED_KEYS))
    keys = torch.cat([torch.arange(limit), torch.tensor(sampled, dtype=torch.int64)]).to(device)

    def seen(position: int) -> torch.Tensor:
        try:
            mask = mask_function(zero, zero, zero + position, keys)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ModelRefused("the attention mask depends on more than positions") from error
        return mask.expand(len(keys))

    window = int(seen(limit - 1)[:limit].sum())
    for position in {0, limit // 3, limit // 2, max(0, limit - 2), limit - 1, end - 1}:
        wanted = keys <= position
        if window < limit:
            wanted &= keys > position - window
        if not torch.equal(seen(position), wanted):
            raise ModelRefused(
                "tokens see something other than all earlier tokens or a sliding window of them"
            )
    return window if window < limit else None


def _check_layer_count(model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> None:
    expected = int(model.config.get_text_config().num_hidden_layers)
    if not layers:
        raise ModelRefused(
            f"{type(model).__name__} does not dispatch its attention through transformers' "
            "AttentionInterface"
        )
    if len(layers) != expected:
        raise ModelRefused(
            f"only {len(layers)} of {expected} layers of {type(model).__name__} attend: the state "
            "of the others (linear attention, convolution, state space) is not kept"
        )


def _check_cached_windows(
    model: PreTrainedModel, layers: Sequence[AttentionLayer], max_model_len: int
) -> None:
    """Refuse a model whose cache drops keys that its mask shows: its tokens depend on the cache."""
    with computing(model):
        kept = DynamicCache(config=model.config).layers
    for layer, cached in zip(layers, kept, strict=False):
        window = getattr(cached, "sliding_window", None)
        if window is not None and window < min(
            layer.sliding_window or max_model_len, max_model_len
        ):
            raise ModelRefused(
                f"{type(layer.module).__name__} sees all earlier tokens, but the cache of "
                f"transformers keeps only the last {window} (sliding_window in config.json); set "
                f"max_position_embeddings to at most {window} to serve it"
            )
