"""The size of a model's recurrent state, from its config alone: no weights are read."""

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.errors import ModelRefused
from engine.model.device.state_pool import bytes_per_state
from engine.model.wide.gguf_loader import first_line
from engine.model.wide.loader import opened
from engine.model.wide.mixers import has_mixers, mixers_in


def bytes_of_state(folder: Path) -> int:
    """Bytes of one state, all layers; 0 for a model without, and for one that is not served.

    The modules are made on the device `meta`, where tensors have shapes and no memory.

    Raises:
        ModelRefused: the folder has no config that can be read, or no model can be made of it.
    """
    _, config = opened(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return 0
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not has_mixers(model_class):
        return 0
    try:
        with torch.device("meta"):
            model = model_class._from_config(config)
    except Exception as error:
        raise ModelRefused(f"no model can be made of its config: {first_line(error)}") from error
    return bytes_per_state([mixer.shapes(module) for module, mixer in mixers_in(model)])
