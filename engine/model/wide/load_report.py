"""Refuses a model whose checkpoint does not fit it, by the report of transformers.

Knows no architecture. transformers fills missing tensors with random numbers and ignores tensors
that its model does not have; both only with a warning.
"""

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from engine.errors import ModelRefused
from engine.model.wide.quantization import is_own_buffer
from engine.model.wide.stored_tensors import StoredTensor

#: Layers that predict several tokens at once, for speculative decoding. They change no output.
SPECULATIVE = re.compile(r"^(?:model\.)?mtp(?:_layers)?\.")
LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


def refuse_unfitting(
    model: PreTrainedModel,
    report: Mapping[str, Any],
    path: str | Path,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Refuse a model with tensors that are missing, left over, or of the wrong shape.

    Args:
        model: as loaded.
        report: what `from_pretrained` reports with `output_loading_info` and
            `ignore_mismatched_sizes`.
        path: the folder or name of the model, for the message.
        stored: the tensors of the checkpoint, by name.

    Raises:
        ModelRefused: names one of the tensors, and how many there are.
    """
    missing: Set[str] = report["missing_keys"]
    if missing:
        raise ModelRefused(
            f"the weights of {path} lack {len(missing)} tensors, {min(missing)} among them"
        )
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise ModelRefused(
            f"the weights of {path} do not fit config.json: {name} is stored with the shape "
            f"{list(found)}, but the model needs {list(wanted)}: use config.json and weights of "
            "the same checkpoint"
        )
    left = sorted(name for name in report["unexpected_keys"] if not _is_unused(name, model, stored))
    if left:
        file = f"{stored[left[0]].file} has" if left[0] in stored else "the checkpoint has"
        raise ModelRefused(
            f"{file} {left[0]}, which {type(model).__name__} does not use ({len(left)} such "
            "tensors): use config.json and weights of the same checkpoint, or remove these tensors "
            "if the model does not need them"
        )


def _is_unused(name: str, model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the logits cannot depend on the tensor."""
    if SPECULATIVE.search(name):
        return True
    if name in stored and is_own_buffer(name, stored[name].shape):
        return True
    layer = LAYER.search(name)
    config = model.config.get_text_config()
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    return layer is not None and 0 <= int(layer[1]) - int(config.num_hidden_layers) < int(extra)
