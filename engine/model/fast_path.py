"""Chooses between the two paths: the common decoder where a model is one, transformers elsewhere.

Knows no arithmetic. A form of the fast path is trusted because its logits are those of the wide
path on this machine, for packed prompts in several steps, and never because a config looked right.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch

from engine.batch import BatchRow
from engine.errors import ModelRefused
from engine.model.attention.reference import ReferenceAttention
from engine.model.causal_model import CausalModel
from engine.model.decoder import Decoder
from engine.model.decoder_config import DecoderConfig, NotCommon, read_config
from engine.model.decoder_weights import DecoderWeights, read_weights
from engine.model.kernels.build import KernelsUnavailable, best_variant
from engine.model.kv_pool import KVPool
from engine.model.native_decoder import NativeDecoder
from engine.model.probe import TOLERANCES
from engine.model.step import build_step
from engine.model.transformers_model import TransformersModel
from engine.sampling_params import SamplingParams

ModelPath = Literal["auto", "fast", "wide"]

#: Steps of the check: tokens of each prompt. Chunks and decodes, across the ends of blocks.
CHECKED_STEPS = ((19, 3, 1), (1, 14, 40), (1, 1, 7))

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
    except NotCommon as reason:
        if model_path == "fast":
            raise ModelRefused(f"the fast path cannot serve this model: {reason}") from reason
        logger.info("served by the wide path: %s", reason)
        return served
    for form in _forms(compiled=compiled and weights.embedding.device.type == "cpu"):
        try:
            model = form(config, weights)
            check_against(served, model, block_size=block_size)
        except (KernelsUnavailable, NotCommon, WrongLogits, MemoryError) as reason:
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


@torch.inference_mode()
def check_against(served: TransformersModel, model: CausalModel, *, block_size: int) -> None:
    """Compare the logits of every token of `CHECKED_STEPS`.

    Raises:
        WrongLogits: the median error is beyond what rounding explains.
    """
    if tuple(model.layer_shapes) != tuple(served.layer_shapes):
        raise WrongLogits(f"{model.name} keeps other shapes than the model")
    expected, found = (_logits(one, served, block_size) for one in (served, model))
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    error = float(errors.median())
    if not error <= TOLERANCES[served.model.dtype]:
        raise WrongLogits(f"{model.name} is off by {error:.1e} on this machine")


def _logits(model: CausalModel, served: TransformersModel, block_size: int) -> torch.Tensor:
    """[tokens of all steps, vocabulary], in float32."""
    totals = [sum(lengths) for lengths in zip(*CHECKED_STEPS, strict=True)]
    blocks_each = -(-max(totals) // block_size)
    dtype, device = served.model.dtype, served.model.device
    pool = KVPool(
        served.layer_shapes,
        num_blocks=blocks_each * len(totals),
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    prompts = [
        [(7919 * place + length) % served.vocab_size for place in range(length)]
        for length in totals
    ]
    starts = [0] * len(totals)
    logits = []
    for lengths in CHECKED_STEPS:
        rows = [
            BatchRow(
                request_id=str(index),
                token_ids=prompts[index][starts[index] : starts[index] + length],
                start=starts[index],
                # Scattered, and in no order.
                block_ids=range(len(totals) * blocks_each - 1 - index, -1, -len(totals)),
                samples=True,
                sampling=SamplingParams(max_tokens=1),
                prompt_token_ids=[],
                output_token_ids=[],
            )
            for index, length in enumerate(lengths)
        ]
        inputs, begun = build_step(
            rows, block_size=block_size, backend=ReferenceAttention(), device=device
        )
        inputs = replace(inputs, logit_rows=torch.arange(len(inputs.token_ids), device=device))
        pool.clear(begun)
        logits.append(model.forward(inputs, pool).float()[:, : served.vocab_size])
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(logits)
