"""Loads the text model of a multimodal checkpoint, without its towers for images.

Knows the names of the types that were compared with transformers. transformers' own class computes
the text; only the modules that a prompt of text does not use are removed before weights are read.
"""

import functools
import re
from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.errors import ModelRefused

#: The types that are served. Each has a test that compares its tokens with those of the whole
#: model: others may attend to a prompt in both directions, or change text by other means.
WRAPPERS = frozenset(
    {
        "aya_vision",
        "cohere2_vision",
        "gemma3",
        "glm4v",
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "ovis2",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether the text model is to be loaded out of a multimodal checkpoint of this config."""
    return config.model_type in WRAPPERS and hasattr(config, "text_config")


def refuse_unknown_wrapper(config: PreTrainedConfig) -> None:
    """Refuse a multimodal model that is not one of `WRAPPERS`.

    Raises:
        ModelRefused: names the type and those that are served.
    """
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise ModelRefused(
            f"{config.model_type} is a multimodal model whose text model is not served; served are "
            f"those of {', '.join(sorted(WRAPPERS))}"
        )


def text_only_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of this wrapper in transformers, whose models lack all modules but the text model.

    transformers reports no tensor that the removed modules would have had as left over; it still
    reports every other one. The name is that of the original class, because transformers finds the
    conversions of a checkpoint's tensors by the names of classes.
    """
    return _text_only(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])


@functools.cache
def _text_only(whole: Any) -> type[PreTrainedModel]:
    def init(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        whole.__init__(self, config, *args, **options)
        ignored = self._keys_to_ignore_on_load_unexpected or ()
        names = "|".join(map(re.escape, sorted(_remove_towers(self))))
        self._keys_to_ignore_on_load_unexpected = {*ignored, f"^(?:{names})$"}

    attributes = {"__init__": init, "__module__": whole.__module__}
    made: type[PreTrainedModel] = type(whole.__name__, (whole,), attributes)
    return made


def _remove_towers(model: Any) -> frozenset[str]:
    """Remove the siblings of the text model; returns the names of their tensors."""
    base, text = model.base_model, model.get_decoder()
    (prefix,) = [name for name, module in model.named_modules() if module is base]
    names: set[str] = set()
    for child, module in list(base.named_children()):
        if (
            any(part is text for part in module.modules())
            or module is model.get_output_embeddings()
        ):
            continue
        path = f"{prefix}.{child}" if prefix else child
        names |= {f"{path}.{name}" for name in module.state_dict()}
        delattr(base, child)
    return frozenset(names)
