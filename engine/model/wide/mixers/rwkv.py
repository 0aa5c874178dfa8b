"""The two mixers of RWKV-4: time mixing, which is its attention, and channel mixing.

Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, section 3.1 and appendix D.
Both mix each token with the one before it. Time mixing averages values v with weights exp(k), which
decay by exp(-w) a token; that of the token itself is exp(k + u):

    output = (n + exp(k + u) v) / (d + exp(k + u))        n = exp(-w) n + exp(k) v
                                                          d = exp(-w) d + exp(k)

The sums n and d are stored divided by exp(m), where m is the highest exponent in them.
"""

from functools import partial
from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.wide.mixers.functions import sigmoid
from engine.model.wide.mixers.layer_state import LayerState

#: The highest exponent of sums without a token.
NO_EXPONENT = -1e38


class RwkvTimeMixing:
    """State: the token before, and the sums n and d with their exponent m for each channel."""

    classes = frozenset({"RwkvSelfAttention"})
    has_kernels = False

    def shapes(self, module: Any) -> StateShapes:
        return (1, module.key.in_features), (3, module.attention_hidden_size)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState
    ) -> tuple[torch.Tensor, None]:
        before = _before(hidden, state)
        key = module.key(_between(module.time_mix_key, hidden, before))
        value = module.value(_between(module.time_mix_value, hidden, before))
        gate = module.receptance(_between(module.time_mix_receptance, hidden, before))
        outputs, sums = state.rows.scan(
            partial(_update, -torch.exp(module.time_decay.float()), module.time_first.float()),
            state.read(1),
            key.float(),
            value.float(),
            state.rows.begins[:, None],
        )
        state.write(1, sums)
        gate = sigmoid(gate.float()).to(hidden.dtype)
        return module.output(gate * outputs.to(hidden.dtype)), None


class RwkvChannelMixing:
    """State: the token before."""

    classes = frozenset({"RwkvFeedForward"})
    has_kernels = False

    def shapes(self, module: Any) -> StateShapes:
        return ((1, module.key.in_features),)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState
    ) -> tuple[torch.Tensor, None]:
        before = _before(hidden, state)
        key = module.key(_between(module.time_mix_key, hidden, before))
        gate = module.receptance(_between(module.time_mix_receptance, hidden, before))
        value = module.value(torch.square(torch.relu(key)))
        return sigmoid(gate.float()).to(hidden.dtype) * value, None


def _before(hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
    """[tokens, width], the input of the token before each; zeros before the first."""
    window, history = state.rows.window(hidden.float(), state.read(0))
    state.write(0, history)
    return next(window).to(hidden.dtype)


def _between(share: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A mixture of two tokens, with the share of the later one in each channel."""
    share = share.view(-1)
    return hidden * share + before * (1 - share)


def _update(
    log_decay: torch.Tensor,
    bonus: torch.Tensor,
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, 3, channels], and [rows, channels]."""
    above, below, highest = state.unbind(dim=1)
    highest = torch.where(begins, torch.full_like(highest, NO_EXPONENT), highest)
    top = torch.maximum(highest, key + bonus)
    old, own = torch.exp(highest - top), torch.exp(key + bonus - top)
    output = (old * above + own * value) / (old * below + own)
    top = torch.maximum(highest + log_decay, key)
    old, own = torch.exp(highest + log_decay - top), torch.exp(key - top)
    new = torch.stack((old * above + own * value, old * below + own, top), dim=1)
    return new, output
