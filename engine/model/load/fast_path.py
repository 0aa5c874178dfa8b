"""Chooses the path of a model: the common decoder if it can compute it, otherwise transformers.

Knows no arithmetic. The fast path has several forms. A form is used only if its logits for packed
prompts in several steps agree, on this machine, with those of transformers for each prompt as a
whole; a matching config alone is not enough. With adapters or a quantized cache, which transformers
does not compute, it is compared with the wide path.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch

from engine.errors import ModelRefused
from engine.model.adapters import Adapter
from engine.model.causal_model import CausalModel, state_shapes_of
from engine.model.checks.own_attention import TOLERANCES, own_logits, relative_errors
from engine.model.checks.rehearsal import prompt_of, reference_rehearsal
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_adapters import DecoderAdapter, map_adapter
from engine.model.decoder.decoder_config import DecoderConfig, NotSupported
from engine.model.decoder.decoder_weights import DecoderWeights, read_weights
from engine.model.decoder.fused_decoder import FusedDecoder
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.device_errors import cause_of, is_out_of_memory
from engine.model.device.quantized_kv import QUANTIZED
from engine.model.device.weight_files import WeightFiles
from engine.model.kernels.build import KernelsUnavailable, best_variant
from engine.model.kernels.quantized import StoredWeight
from engine.model.wide.stored_layers import dequantize
from engine.model.wide.transformers_model import TransformersModel

ModelPath = Literal["auto", "fast", "wide"]

#: Largest accepted relative error of a single token. Rounding can change a token's logits by a
#: quarter (measured in bfloat16, with a random model); logits that have nothing to do with the
#: expected ones are off by more than one. What is wrong by less in every token, as with a wrong
#: factor, the median must show.
WORST_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}
#: Largest accepted median error if routers choose the experts. Rounding decides between experts
#: with nearly equal scores, so single tokens may differ in everything.
ROUTED_TOLERANCES = TOLERANCES | {torch.float16: 0.25, torch.bfloat16: 0.25}
#: Largest accepted median error if weights are quantized, and the form keeps to `TOLERANCES` with
#: precise inputs. In bfloat16, inputs of 8 bits round more than the type: random weights of 1.04 B
#: parameters in Q4_K_M have 0.15, and 0.08 in bfloat16.
INTEGER_TOLERANCES = TOLERANCES | {torch.bfloat16: 0.25}
#: Largest accepted median error over a quantized cache: where two forms round a number differently,
#: the stored integer may differ by one. SmolLM2 has 2e-3 in float32.
QUANTIZED_TOLERANCES = {torch.float32: 2e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
#: Steps of the check: the number of tokens of each prompt. Chunks and decodes cross block ends.
CHECKED_STEPS = ((19, 3, 1), (1, 14, 40), (1, 1, 7))
CHECKED_LENGTHS = [sum(lengths) for lengths in zip(*CHECKED_STEPS, strict=True)]
#: An adapter's effect on a token counts as lost if the error is more than this share of the effect.
#: It may be lost in at most half of those tokens of a prompt in which it is visible.
MOST_LOST = 0.5
#: An effect is visible in a token if it is this many times the rounding error of the median token
#: and of this token.
VISIBLE = 4

logger = logging.getLogger(__name__)

Form = Callable[[DecoderConfig, DecoderWeights, Sequence[DecoderAdapter]], CausalModel]


class WrongLogits(Exception):
    """A form of the fast path disagrees with the wide path; the message says by how much."""


#: What leaves out a path or a form. Of the RuntimeErrors of torch only a lack of memory does.
REFUSALS = (KernelsUnavailable, NotSupported, WrongLogits, MemoryError, RuntimeError)


def choose_model(
    served: TransformersModel,
    *,
    adapters: Sequence[Adapter] = (),
    model_path: ModelPath = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    compiled: bool = True,
    weight_files: WeightFiles | None = None,
    stored: Mapping[str, StoredWeight] = MappingProxyType({}),
    passed: str | None = None,
) -> CausalModel:
    """The fastest model with the same results as `served`; `served` itself if there is no other.

    Args:
        served: the probed model, to which the adapters have been added.
        adapters: the adapters that the chosen model must also compute.
        model_path: "wide" excludes the fast path, "fast" requires it.
        block_size: block size of the pool that will be used.
        cache_dtype: the type of that pool; None for the model's.
        compiled: whether the C++ form may be chosen.
        weight_files: where the C++ form shares its packed weights; None for nowhere.
        stored: as in `LoadedModel`. The C++ form computes with them as they are. For every other
            form and for the wide path, the weights of `served` are dequantized.
        passed: the name of a form that is known to agree with `served` on this machine.

    Raises:
        ModelRefused: `model_path` is "fast", and no form of the fast path can serve the model.
    """
    # Only the wide path takes embeddings instead of tokens.
    if model_path == "wide" or served.picture_reader is not None:
        return _dequantized(served)
    try:
        config = read_config(served)
        weights = read_weights(config, served.model.state_dict(keep_vars=True), stored)
        mapped = [map_adapter(config, adapter) for adapter in adapters]
    except REFUSALS as error:
        reason = _reason(error)
        if model_path == "fast":
            raise ModelRefused(f"the fast path cannot serve this model: {reason}") from error
        logger.info("served by the wide path: %s", reason)
        return _dequantized(served)
    for form in _forms(weights.embedding.device.type, compiled=compiled, weight_files=weight_files):
        try:
            if form is Decoder and stored:
                dequantize(served.model)
                weights = read_weights(config, served.model.state_dict(keep_vars=True))
            model = form(config, weights, mapped)
            names = [adapter.name for adapter in adapters]
            if model.name != passed:
                check_against(
                    served, model, block_size=block_size, cache_dtype=cache_dtype, adapters=names
                )
        except REFUSALS as error:
            logger.warning("a form of the fast path cannot be used: %s", _reason(error))
        else:
            return model
    if model_path == "fast":
        raise ModelRefused("no form of the fast path works on this machine; see the log")
    return served


def _dequantized(served: TransformersModel) -> TransformersModel:
    dequantize(served.model)
    return served


def _reason(error: Exception) -> str:
    """Why a path or a form is left out; any other RuntimeError than a lack of memory is raised."""
    if is_out_of_memory(error):
        return f"there is not enough memory: {cause_of(error)}"
    if isinstance(error, RuntimeError):
        raise error
    return str(error)


def _forms(device_type: str, weight_files: WeightFiles | None, *, compiled: bool) -> Iterator[Form]:
    if device_type == "cuda":
        yield FusedDecoder
    if device_type == "cpu" and compiled:
        variant = best_variant()
        yield lambda config, weights, adapters: NativeDecoder(
            config, weights, adapters, variant=variant, weight_files=weight_files
        )
    yield Decoder


def check_against(
    served: TransformersModel,
    model: CausalModel,
    *,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
    adapters: Sequence[str] = (),
) -> None:
    """Compare the logits of every token of `CHECKED_STEPS`, without and with each adapter.

    Without adapters, the expected logits are those of the model's own attention, else those of the
    wide path.

    The tokens of a model with experts first use all of them, which no rounding can change, then
    those that the routers choose. A quantized cache is compared after the model's own.

    Raises:
        WrongLogits: the median error or the error of a token is larger than rounding explains, or
            an adapter has another effect.
    """
    if tuple(model.layer_shapes) != tuple(served.layer_shapes):
        raise WrongLogits(f"{model.name} has other shapes of keys and values than the model")
    if tuple(state_shapes_of(model)) != served.state_shapes:
        raise WrongLogits(f"{model.name} has other shapes of recurrent states than the model")
    with every_expert(served, model):
        _check_closely(served, model, block_size, adapters)
        if cache_dtype == QUANTIZED:
            _check_quantized(served, model, block_size)
    if served.has_experts:
        _, errors = _compare(served, model, block_size, (), is_own=not adapters)
        error = float(errors.median())
        if not error <= ROUTED_TOLERANCES[served.model.dtype]:
            raise WrongLogits(f"the experts that {model.name} chooses change it by {error:.1e}")


@contextmanager
def every_expert(served: TransformersModel, model: CausalModel) -> Iterator[None]:
    """Let each token use all experts of its layer, in both models."""
    routers: list[Any] = [
        module
        for module in served.model.modules()
        if hasattr(module, "top_k") and hasattr(module, "num_experts")
    ]
    counts = [router.top_k for router in routers]
    if not routers or not isinstance(model, Decoder | NativeDecoder):
        yield
        return
    chosen = model.num_chosen
    try:
        for router in routers:
            router.top_k = router.num_experts
        model.num_chosen = routers[0].num_experts
        yield
    finally:
        model.num_chosen = chosen
        for router, count in zip(routers, counts, strict=True):
            router.top_k = count


def _check_closely(
    served: TransformersModel, model: CausalModel, block_size: int, adapters: Sequence[str]
) -> None:
    plain, noise = _compare_closely(served, model, block_size, (), is_own=not adapters)
    at_once = len(CHECKED_LENGTHS)
    for first in range(0, len(adapters), at_once):
        names = adapters[first : first + at_once]
        expected, errors = _compare_closely(served, model, block_size, names)
        # Errors are compared with the adapter's effect, which may be far smaller than the logits.
        effects = (expected - plain).norm(dim=-1)
        visible = effects > VISIBLE * noise.clamp(min=noise.median())
        lost = (errors > MOST_LOST * effects) & visible
        of_prompts = zip(*(part.split(CHECKED_LENGTHS) for part in (lost, visible)), strict=True)
        for index, (num_lost, num_visible) in enumerate((a.sum(), b.sum()) for a, b in of_prompts):
            if 2 * num_lost > num_visible:
                name = names[index % len(names)]
                raise WrongLogits(f"{model.name} computes another effect of the adapter {name}")


def _check_quantized(served: TransformersModel, model: CausalModel, block_size: int) -> None:
    """Compare the logits over quantized caches, in the median token."""
    _, errors = _compare(served, model, block_size, (), cache_dtype=QUANTIZED)
    error = float(errors.median())
    if not error <= QUANTIZED_TOLERANCES[served.model.dtype]:
        raise WrongLogits(f"over an 8-bit KV cache, {model.name} is off by {error:.1e}")


def _compare_closely(
    served: TransformersModel,
    model: CausalModel,
    block_size: int,
    adapters: Sequence[str],
    *,
    is_own: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected logits [tokens, vocabulary], and each token's distance from them [tokens].

    Raises:
        WrongLogits: as `check_against`.
    """
    dtype = served.model.dtype
    expected, errors = _compare(served, model, block_size, adapters, is_own=is_own)
    compared = errors
    if isinstance(model, NativeDecoder) and model.is_quantized:
        _refuse(model, errors, INTEGER_TOLERANCES[dtype], WORST_TOLERANCES[dtype])
        if float(errors.median()) > TOLERANCES[dtype]:
            # The rounding of inputs may explain it, and may as well hide a wrong computation.
            with model.precise_inputs():
                _, compared = _compare(served, model, block_size, adapters, expected=expected)
    _refuse(model, compared, TOLERANCES[dtype], WORST_TOLERANCES[dtype])
    return expected, errors * expected.norm(dim=-1)


def _refuse(model: CausalModel, errors: torch.Tensor, largest: float, worst: float) -> None:
    """Raise WrongLogits if the median error or the error of a token is too large, or not finite."""
    median, highest = float(errors.median()), float(errors.max())
    if not (median <= largest and highest <= worst):
        raise WrongLogits(
            f"on this machine {model.name} is off by {median:.1e} in the median, and by "
            f"{highest:.1e} in the worst token"
        )


def _compare(
    served: TransformersModel,
    model: CausalModel,
    block_size: int,
    adapters: Sequence[str],
    *,
    cache_dtype: torch.dtype | None = None,
    is_own: bool = False,
    expected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected logits [tokens, vocabulary], and the relative error of each token [tokens].

    Unless given, expected are those of the model's own attention, with `is_own`, or else of the
    wide path.
    """
    dtype = cache_dtype or served.model.dtype
    prompts = [prompt_of(length, served.vocab_size) for length in CHECKED_LENGTHS]
    rehearsal = reference_rehearsal(dtype=dtype, device=served.model.device, block_size=block_size)

    def in_steps(one: CausalModel) -> torch.Tensor:
        names = adapters or (None,)
        return torch.cat(rehearsal.logits(one, prompts, CHECKED_STEPS, adapters=names))

    if expected is None:
        expected = torch.cat(own_logits(served, prompts)).float() if is_own else in_steps(served)
    return expected, relative_errors((in_steps(model) - expected).norm(dim=-1), expected)
