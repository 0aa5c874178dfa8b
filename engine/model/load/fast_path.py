"""Chooses between the two paths: the common decoder where a model is one, transformers elsewhere.

Knows no arithmetic. A form of the fast path is used only if its logits agree with the wide path's
on this machine, for packed prompts in several steps; a config that looks right is not enough.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from engine.errors import ModelRefused
from engine.model.adapters import Adapter
from engine.model.causal_model import CausalModel
from engine.model.checks.probe import TOLERANCES, relative_errors
from engine.model.checks.rehearsal import prompt_of, reference_rehearsal
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_adapters import DecoderAdapter, place_adapter
from engine.model.decoder.decoder_config import DecoderConfig, NotCommon, read_config
from engine.model.decoder.decoder_weights import DecoderWeights, read_weights
from engine.model.decoder.fused_decoder import FusedDecoder
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.kernels.build import KernelsUnavailable, best_variant
from engine.model.wide.transformers_model import TransformersModel

ModelPath = Literal["auto", "fast", "wide"]

#: Largest accepted relative error of any one token: rounding may carry a token of a random model
#: some way off (a quarter, measured in bfloat16); a token that is plainly wrong is off by more than
#: one.
WORST_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}
#: Steps of the check: tokens of each prompt. Chunks and decodes, across the ends of blocks.
CHECKED_STEPS = ((19, 3, 1), (1, 14, 40), (1, 1, 7))
CHECKED_LENGTHS = [sum(lengths) for lengths in zip(*CHECKED_STEPS, strict=True)]
#: An adapter's effect on a token is lost if the error is more than this share of it. It may be lost
#: in at most half of the tokens of a prompt where it is visible, ...
MOST_LOST = 0.5
#: ... that is, this many times what rounding does to the median token, and to this one.
VISIBLE = 4
#: The fast path's fused weights need memory beside the model's own; the wide path needs no more.
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)

logger = logging.getLogger(__name__)

Form = Callable[[DecoderConfig, DecoderWeights, Sequence[DecoderAdapter]], CausalModel]


class WrongLogits(Exception):
    """A form of the fast path disagrees with the wide path; says by how much."""


def choose_model(
    served: TransformersModel,
    *,
    adapters: Sequence[Adapter] = (),
    model_path: ModelPath = "auto",
    block_size: int = 16,
    compiled: bool = True,
) -> CausalModel:
    """The fastest model that computes what `served` computes; `served` itself if there is none.

    Args:
        served: from the probe; it computes with the adapters.
        adapters: those that the chosen model has to compute with, too.
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
        placed = [place_adapter(config, adapter) for adapter in adapters]
    except (NotCommon, *OUT_OF_MEMORY) as reason:
        if model_path == "fast":
            raise ModelRefused(f"the fast path cannot serve this model: {reason}") from reason
        logger.info("served by the wide path: %s", reason)
        return served
    for form in _forms(weights.embedding.device.type, compiled=compiled):
        try:
            model = form(config, weights, placed)
            names = [adapter.name for adapter in adapters]
            check_against(served, model, block_size=block_size, adapters=names)
        except (KernelsUnavailable, WrongLogits, NotCommon, *OUT_OF_MEMORY) as reason:
            logger.warning("one form of the fast path is left out: %s", reason)
        else:
            return model
    if model_path == "fast":
        raise ModelRefused("no form of the fast path works on this machine; see the log")
    return served


def _forms(device_type: str, *, compiled: bool) -> Iterator[Form]:
    if device_type == "cuda":
        yield FusedDecoder
    if device_type == "cpu" and compiled:
        variant = best_variant()
        yield lambda config, weights, adapters: NativeDecoder(
            config, weights, adapters, variant=variant
        )
    yield Decoder


def check_against(
    served: TransformersModel,
    model: CausalModel,
    *,
    block_size: int,
    adapters: Sequence[str] = (),
) -> None:
    """Compare the logits of every token of `CHECKED_STEPS`, without adapters and with each of them.

    Raises:
        WrongLogits: the median error, or that of one token, is beyond what rounding explains; or
            an adapter does something else.
    """
    if tuple(model.layer_shapes) != tuple(served.layer_shapes):
        raise WrongLogits(f"{model.name} keeps other shapes than the model")
    plain, noise = _compare(served, model, block_size, ())
    at_once = len(CHECKED_LENGTHS)
    for first in range(0, len(adapters), at_once):
        names = adapters[first : first + at_once]
        expected, errors = _compare(served, model, block_size, names)
        # An adapter's effect may be far smaller than the logits: compare errors with the effect.
        effects = (expected - plain).norm(dim=-1)
        visible = effects > VISIBLE * noise.clamp(min=noise.median())
        lost = (errors > MOST_LOST * effects) & visible
        of_prompts = zip(*(part.split(CHECKED_LENGTHS) for part in (lost, visible)), strict=True)
        for index, (num_lost, num_visible) in enumerate((a.sum(), b.sum()) for a, b in of_prompts):
            if 2 * num_lost > num_visible:
                name = names[index % len(names)]
                raise WrongLogits(f"{model.name} adds something else with the adapter {name}")


def _compare(
    served: TransformersModel, model: CausalModel, block_size: int, adapters: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected logits, [tokens, vocabulary], and each token's distance from them, [tokens]."""
    dtype = served.model.dtype
    prompts = [prompt_of(length, served.vocab_size) for length in CHECKED_LENGTHS]
    rehearsal = reference_rehearsal(dtype=dtype, device=served.model.device, block_size=block_size)
    expected, found = (
        torch.cat(rehearsal.logits(one, prompts, CHECKED_STEPS, adapters=adapters or (None,)))
        for one in (served, model)
    )
    distances = (found - expected).norm(dim=-1)
    errors = relative_errors(distances, expected)
    error, worst = float(errors.median()), float(errors.max())
    if not (error <= TOLERANCES[dtype] and worst <= WORST_TOLERANCES[dtype]):
        raise WrongLogits(
            f"{model.name} is off by {error:.1e}, in one token by {worst:.1e}, on this machine"
        )
    return expected, distances
