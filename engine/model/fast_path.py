"""Chooses between the two paths: the common decoder where a model is one, transformers elsewhere.

Knows no arithmetic. A form of the fast path is trusted because its logits are those of the wide
path on this machine, for packed prompts in several steps, and never because a config looked right.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from engine.errors import ModelRefused
from engine.model.causal_model import CausalModel
from engine.model.decoder import Decoder
from engine.model.decoder_config import DecoderConfig, NotCommon, read_config
from engine.model.decoder_weights import DecoderWeights, read_weights
from engine.model.kernels.build import KernelsUnavailable, best_variant
from engine.model.native_decoder import NativeDecoder
from engine.model.probe import TOLERANCES
from engine.model.rehearsal import reference_rehearsal
from engine.model.transformers_model import TransformersModel

ModelPath = Literal["auto", "fast", "wide"]

#: Largest accepted error of any one token: rounding may carry a token of a random model some way
#: off (a quarter, measured in bfloat16), a token that is plainly wrong is off by more than one.
WORST_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}
#: Steps of the check: tokens of each prompt. Chunks and decodes, across the ends of blocks.
CHECKED_STEPS = ((19, 3, 1), (1, 14, 40), (1, 1, 7))
#: Fused weights need room beside the model's own: the wide path has none to ask for.
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)

logger = logging.getLogger(__name__)

Form = Callable[[DecoderConfig, DecoderWeights], CausalModel]


class WrongLogits(Exception):
    """A form of the fast path computes something else than the wide path; says how far off."""


def choose_model(
    served: TransformersModel,
    *,
    model_path: ModelPath = "auto",
    block_size: int = 16,
    compiled: bool = True,
) -> CausalModel:
    """The fastest model that computes what `served` computes; `served` itself if there is none.

    Args:
        served: from the probe.
        model_path: "wide" leaves the fast path out, "fast" insists on it.
        block_size: of the pool that will be used.
        compiled: whether the compiled form may be chosen.

    Raises:
        ModelRefused: `model_path` is "fast" and the model is not the common decoder.
    """
    if model_path == "wide":
        return served
    try:
        config = read_config(served)
        weights = read_weights(config, served.model.state_dict())
    except (NotCommon, *OUT_OF_MEMORY) as reason:
        if model_path == "fast":
            raise ModelRefused(f"the fast path cannot serve this model: {reason}") from reason
        logger.info("served by the wide path: %s", reason)
        return served
    for form in _forms(compiled=compiled and weights.embedding.device.type == "cpu"):
        try:
            model = form(config, weights)
            check_against(served, model, block_size=block_size)
        except (KernelsUnavailable, WrongLogits, NotCommon, *OUT_OF_MEMORY) as reason:
            logger.warning("one form of the fast path is left out: %s", reason)
        else:
            return model
    if model_path == "fast":
        raise ModelRefused("no form of the fast path works on this machine; see the log")
    return served


def _forms(*, compiled: bool) -> Iterator[Form]:
    if compiled:
        yield lambda config, weights: NativeDecoder(config, weights, variant=best_variant())
    yield Decoder


def check_against(served: TransformersModel, model: CausalModel, *, block_size: int) -> None:
    """Compare the logits of every token of `CHECKED_STEPS`.

    Raises:
        WrongLogits: the median error, or that of one token, is beyond what rounding explains.
    """
    if tuple(model.layer_shapes) != tuple(served.layer_shapes):
        raise WrongLogits(f"{model.name} keeps other shapes than the model")
    dtype = served.model.dtype
    totals = [sum(lengths) for lengths in zip(*CHECKED_STEPS, strict=True)]
    prompts = [
        [(7919 * place + length) % served.vocab_size for place in range(length)]
        for length in totals
    ]
    rehearsal = reference_rehearsal(dtype=dtype, device=served.model.device, block_size=block_size)
    expected, found = (
        torch.cat(rehearsal.logits(one, prompts, CHECKED_STEPS)) for one in (served, model)
    )
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    error, worst = float(errors.median()), float(errors.max())
    if not (error <= TOLERANCES[dtype] and worst <= WORST_TOLERANCES[dtype]):
        raise WrongLogits(
            f"{model.name} is off by {error:.1e}, in one token by {worst:.1e}, on this machine"
        )
