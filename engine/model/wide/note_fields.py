"""Refuses fields of `quantization_config` that are unknown or have another meaning.

Knows no format of checkpoints.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.errors import ModelRefused

#: The most characters of a value that a refusal repeats.
MAX_SHOWN = 60
#: The largest size of a group or a block. torch counts in 63 bits, and multiplies such sizes.
MAX_SIZE = (1 << 31) - 1


def check_fields(method: str, where: str, note: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a note with a field that is not known: it may change what the weights mean.

    Args:
        method: what the note names as the method of quantization.
        where: the dotted path of the note inside `quantization_config`; empty for itself.
        note: a JSON object.
        known: the names of fields that may be in it.

    Raises:
        ModelRefused: names the field.
    """
    for name in note.keys() - known:
        raise refused_field(method, f"{where}.{name}".lstrip("."), note[name])


def check_value(method: str, path: str, value: object, served: Sequence[object]) -> None:
    """Refuse a value that is not one of those that are served, of the same type."""
    if not any(type(value) is type(one) and value == one for one in served):
        raise refused_field(method, path, value, served)


def refused_field(
    method: str, path: str, value: object, served: Sequence[object] = ()
) -> ModelRefused:
    """The refusal of a field, by its dotted path inside `quantization_config`."""
    shown, hint = repr(value), ""
    if len(shown) > MAX_SHOWN:
        shown = f"{shown[:MAX_SHOWN]}…"
    if served:
        hint = f"; served: {', '.join(map(str, served))}"
    return ModelRefused(
        f"config.json describes quantized weights ({method}) with quantization_config."
        f"{path[:MAX_SHOWN]} = {shown}, which is not served{hint}: use a checkpoint that is "
        "quantized otherwise, or not at all"
    )


def is_size(value: object) -> bool:
    """Whether it may be the size of a group or a block."""
    return type(value) is int and 1 <= value <= MAX_SIZE
