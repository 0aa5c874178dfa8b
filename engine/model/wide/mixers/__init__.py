"""Mixers with a recurrent state: modules of transformers whose recurrence is computed here.

transformers computes a prompt in chunks and a decode in another way, and keeps the state in a cache
of its own. Here one function computes both, token by token in float32, and the state is in a slot
of the request. So the state after t tokens is a function of these tokens alone, however they were
divided into steps. Projections, norms and what follows the recurrence stay the module's own: where
torch divides them among threads by the number of tokens, their last bits may depend on it, as in
all layers of the wide path. `deterministic` checks that.

To add a kind, write `mixers/<kind>.py` with a class that is a `Mixer`, and list an instance in
`MIXERS`. `LayerState` has what kinds share, compiled where it can be: a causal convolution, and a
recurrence of matrices. `RecurrentRows` has a scan over tokens for every other recurrence. Compare
with transformers in `tests/engine/model/wide/test_mixers.py`, and regenerate the table of models.
"""

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from engine.model.wide.mixers.compressed_convolution import CompressedConvolution
from engine.model.wide.mixers.gated_delta_net import GatedDeltaNet
from engine.model.wide.mixers.interface import Mixer
from engine.model.wide.mixers.kimi_delta_attention import KimiDeltaAttention
from engine.model.wide.mixers.lightning_attention import LightningAttention
from engine.model.wide.mixers.mamba import Mamba
from engine.model.wide.mixers.mamba2 import Mamba2
from engine.model.wide.mixers.rg_lru import GatedLinearRecurrentUnit
from engine.model.wide.mixers.rwkv import RwkvChannelMixing, RwkvTimeMixing
from engine.model.wide.mixers.short_convolution import ShortConvolution

#: Every kind that is served.
MIXERS: Sequence[Mixer] = (
    ShortConvolution(),
    GatedDeltaNet(),
    KimiDeltaAttention(),
    Mamba2(),
    Mamba(),
    LightningAttention(),
    GatedLinearRecurrentUnit(),
    CompressedConvolution(),
    RwkvTimeMixing(),
    RwkvChannelMixing(),
)

_MIXER_OF = {name: mixer for mixer in MIXERS for name in mixer.classes}


def has_mixers(model_class: type[nn.Module]) -> bool:
    """Whether the module that defines a model's class also defines mixers that are served."""
    return bool(_MIXER_OF.keys() & vars(sys.modules[model_class.__module__]).keys())


def mixers_in(model: nn.Module) -> Iterator[tuple[nn.Module, Mixer]]:
    """The modules of a model that have a recurrent state, in the order of the model."""
    for module in model.modules():
        mixer = _MIXER_OF.get(type(module).__name__)
        if mixer is not None:
            yield module, mixer
