"""Measures what the encoder of pictures needs of a device, before a KV pool takes the rest."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelRefused
from engine.model.causal_model import CausalModel
from engine.model.device.device_errors import cause_of, is_out_of_memory
from engine.model.device.memory import peak_bytes_of, release_memory
from engine.model.device.pool_size import NO_ENCODER, EncoderMemory
from engine.model.wide.transformers_model import TransformersModel

#: The arguments of the encoder for the largest picture that it may get, from the model's source.
LargestPicture = Callable[[Path], Mapping[str, Any]]

logger = logging.getLogger(__name__)


def encoder_memory(
    model: CausalModel,
    device: torch.device,
    source: Path,
    largest_picture: LargestPicture | None,
    *,
    measure: Callable[[Callable[[], object], torch.device], int] = peak_bytes_of,
) -> EncoderMemory:
    """The memory that pictures need of a GPU, measured by encoding the largest one.

    None on a CPU: a pool leaves more than half of its memory free, and encoding there would take
    longer than everything else at load. `measure` runs a function, and returns the most bytes that
    it had at once. ModelRefused if there is not enough memory for one picture.
    """
    reader = model.picture_reader if isinstance(model, TransformersModel) else None
    if device.type == "cpu" or reader is None or largest_picture is None:
        return NO_ENCODER
    outputs: list[torch.Tensor] = []
    pixels = largest_picture(source)
    try:
        encoding_bytes = measure(lambda: outputs.append(reader.encode(pixels)), device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = "there is not enough memory to encode the largest picture: set or lower"
        raise ModelRefused(f"{message} max_picture_pixels ({cause_of(error)})") from error
    kept_bytes = max(reader.max_kept_bytes, outputs[0].nbytes)
    outputs.clear()
    release_memory(device)
    logger.info("encoding the largest picture takes %d bytes", encoding_bytes)
    return EncoderMemory(encoding_bytes, kept_bytes)
