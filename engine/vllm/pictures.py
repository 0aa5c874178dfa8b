"""Pictures for vLLM: Quire prepares their pixels and placeholders, and vLLM encodes them.

vLLM's own processor of a model is not used. It would demand the tokenizer and libraries for videos,
and other pixels than the native engine's would be other tokens. In its place vLLM gets one that
says only how large a picture may be.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseProcessingInfo

from engine.picture import Picture
from engine.request import Request

_IMAGE = "image"


class PictureInfo(BaseProcessingInfo):  # type: ignore[misc]
    """What vLLM asks of a model's pictures."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """See vLLM's BaseProcessingInfo."""
        return {_IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Any:
        """See vLLM's BaseProcessingInfo. A picture may fill a prompt: a larger one is refused."""
        return dict.fromkeys(mm_counts, seq_len)


class NoProcessor:
    """In place of vLLM's processor of a model: prompts come processed."""

    def __init__(self, info: PictureInfo, _: object) -> None:
        self.info = info

    def get_dummy_mm_inputs(self, *_: object, **__: object) -> None:
        """Nothing to warm up."""


def use_prepared_pictures(model_config: Any) -> None:
    """Let vLLM take pictures as Quire prepares them; call it in each process of vLLM's."""
    from vllm.model_executor.model_loader import get_model_architecture

    model_class, _ = get_model_architecture(model_config)
    if "_processor_factory" in vars(model_class):
        # vLLM would warn that it is replaced.
        del model_class._processor_factory
    register: Any = MULTIMODAL_REGISTRY.register_processor
    register(NoProcessor, info=PictureInfo, dummy_inputs=lambda _: None)(model_class)


def input_with_pictures(
    request: Request, token_ids: Sequence[int], *, placeholder: int, dtype: torch.dtype
) -> MultiModalInput:
    """A prompt of vLLM's with the pictures of a request.

    vLLM's caches know a picture by its digest. `placeholder` is the token id that stands for an
    output of the encoder, `dtype` that of the encoder.
    """
    pictures = request.pictures
    tokens = np.asarray(token_ids)
    return mm_input(
        list(token_ids),
        MultiModalKwargsItems({_IMAGE: [_item_of(picture, dtype) for picture in pictures]}),
        {_IMAGE: [picture.key.hex() for picture in pictures]},
        {
            _IMAGE: [
                PlaceholderRange(
                    picture.start,
                    picture.length,
                    torch.from_numpy(tokens[picture.start : picture.end] == placeholder),
                )
                for picture in pictures
            ]
        },
        cache_salt=request.cache_salt or None,
    )


def _item_of(picture: Picture, dtype: torch.dtype) -> MultiModalKwargsItem:
    """The arguments of vLLM's model for one picture, each with how those of several are joined."""
    pixels = {name: torch.as_tensor(values) for name, values in picture.pixels.items()}
    values = pixels["pixel_values"].to(dtype)
    if "image_grid_thw" in pixels:
        grid = _stacked(pixels["image_grid_thw"][0], keep_on_cpu=True)
        return MultiModalKwargsItem({"pixel_values": _joined(values), "image_grid_thw": grid})
    if "pixel_attention_mask" in pixels:
        return MultiModalKwargsItem(
            {
                "pixel_values": _joined(values[0]),
                "pixel_attention_mask": _joined(pixels["pixel_attention_mask"][0]),
                "num_patches": _stacked(torch.tensor(len(values[0])), keep_on_cpu=True),
            }
        )
    fields = {"pixel_values": _stacked(values[0])}
    if "image_sizes" in pixels:
        fields["image_sizes"] = _stacked(pixels["image_sizes"][0], keep_on_cpu=True)
    return MultiModalKwargsItem(fields)


def _stacked(value: torch.Tensor, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
    """A value that gets one more dimension with those of other pictures."""
    return MultiModalFieldElem(data=value, field=MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def _joined(values: torch.Tensor) -> MultiModalFieldElem:
    """Values that follow those of other pictures."""
    field = MultiModalFlatField(slices=[slice(0, len(values))], dim=0)
    return MultiModalFieldElem(data=values, field=field)
