"""Computes with a model's own attention, and compares the wide path with it.

The model's own attention is that of transformers, whole prompts at a time. Knows no kernels.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from engine.errors import ModelRefused
from engine.model.checks.rehearsal import reference_rehearsal
from engine.model.device.device_errors import cause_of, is_device_failure
from engine.model.wide.transformers_model import ATTENTION_NAME, TransformersModel

#: Lengths of the two probe prompts; the first step computes up to FIRST_STEP_TOKENS of each, fewer
#: than half of all: rotary positions that count the tokens of a step are wrong in later steps only,
#: and the median must notice it.
PROBE_LENGTHS = (7, 5)
FIRST_STEP_TOKENS = 2
#: Block size of the probe's pool: small, so that a prompt spans several blocks.
PROBE_BLOCK_SIZE = 2

#: Largest accepted median error of a token's logits, relative to their norm. A dropped feature
#: changes them by tens of per cent. The median tolerates a router that decides a near-tie
#: differently in low precision.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}

logger = logging.getLogger(__name__)


def check_against_own_attention(served: TransformersModel) -> None:
    """Compare the wide path with the model's own attention on each prompt alone.

    Raises:
        ModelRefused: they differ.
    """
    name, tolerance = type(served.model).__name__, TOLERANCES[served.model.dtype]
    error = _error_against_own_attention(served)
    if served.kernels is not None and not error <= tolerance:  # Torch takes their place.
        logger.warning("%s is not used: logits are off by %.1e", served.kernels.name, error)
        served.kernels = None
        error = _error_against_own_attention(served)
    if not error <= tolerance:
        raise ModelRefused(
            f"{name} has other logits with paged attention than with its own attention (off by "
            f"{error:.1%}): it has a feature that this engine does not compute"
        )


def _error_against_own_attention(served: TransformersModel) -> float:
    """The relative error of the median token."""
    model = served.model
    prompts = [prompt.tolist() for prompt in probe_prompts(model)]
    expected = [logits for prompt in prompts for logits in own_logits(served, [prompt])]
    rehearsal = reference_rehearsal(
        dtype=model.dtype, device=model.device, block_size=PROBE_BLOCK_SIZE
    )
    first = [min(FIRST_STEP_TOKENS, len(prompt)) for prompt in prompts]
    rest = [len(prompt) - start for prompt, start in zip(prompts, first, strict=True)]
    steps = [step for step in (first, rest) if any(step)]
    wanted = torch.cat(expected).float()
    found = torch.cat(rehearsal.logits(served, prompts, steps))
    return float(relative_errors((found - wanted).norm(dim=-1), wanted).median())


def own_logits(served: TransformersModel, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits of every token of each prompt, [tokens, vocabulary], in one forward pass.

    Shorter prompts are padded at their end, which no earlier token of a causal model sees.

    Raises:
        ModelRefused: the model cannot be computed.
    """
    model, longest = served.model, max(map(len, prompts))
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    with computing(model), attention_named(model, "eager"):
        logits = model(
            input_ids=torch.tensor(padded, device=model.device),
            position_ids=torch.arange(longest, device=model.device).expand(len(prompts), -1),
            use_cache=False,
            return_dict=True,
        ).logits
    rows = zip(logits[..., : served.vocab_size], prompts, strict=True)
    return [row[: len(prompt)] for row, prompt in rows]


def relative_errors(distances: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each token's distance from the `expected` logits, relative to their norm, [tokens].

    Expected logits may be all zero, as for a lone padding token, whose embedding is zero. Then
    zeros have an error of 0, and anything else has an infinite error.
    """
    return torch.where(distances == 0, 0.0, distances / expected.norm(dim=-1))


def probe_prompts(model: PreTrainedModel) -> list[torch.Tensor]:
    """Two prompts of ids spread over the vocabulary."""
    vocab_size = num_embeddings(model)
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", max(PROBE_LENGTHS)))
    return [
        (torch.arange(min(length, limit), device=model.device) * 7919 + length) % vocab_size
        for length in PROBE_LENGTHS
    ]


def num_embeddings(model: PreTrainedModel) -> int:
    """The number of token ids for which the model has embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return len(weight)


@contextmanager
def computing(model: PreTrainedModel) -> Iterator[None]:
    """Computes without gradients; what the model cannot compute is a reason to refuse it."""
    try:
        with torch.inference_mode():
            yield
    except ModelRefused:
        raise
    except Exception as error:
        if is_device_failure(error):
            raise
        # There may be no kernel for this type and these sizes, or not enough memory; or the fields
        # of the config contradict each other.
        raise ModelRefused(
            f"{type(model).__name__} cannot be computed in {model.dtype} on {model.device}: "
            f"{cause_of(error)}"
        ) from error


@contextmanager
def attention_named(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention function of the model inside the context."""
    _set_attention(model, name)
    try:
        yield
    finally:
        _set_attention(model, ATTENTION_NAME)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention function of the text; a multimodal model has no other module (any more)."""
    has_text = "text_config" in model.config.sub_configs
    model.set_attn_implementation({"": name, "text_config": name} if has_text else name)
