"""Refuses a config.json whose numbers or nesting would cost more than any model is worth.

Knows no architecture. transformers makes lists and modules for counts before it reads a weight, and
memory for every tensor that its model has and the checkpoint lacks.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelRefused
from engine.model.wide.stored_tensors import StoredTensor

#: The most bytes of a config.json. Those in use have up to a tenth of a megabyte.
MAX_CONFIG_BYTES = 16 << 20
#: How many values it may have, and how deep they may be inside each other. transformers copies all
#: of them several times.
MAX_VALUES, MAX_DEPTH = 1 << 17, 64
#: torch counts in 63 bits.
MAX_INTEGER = (1 << 63) - 1
#: The most layers, and the most experts of a layer. The largest models in use have a tenth of each.
MAX_LAYERS, MAX_EXPERTS = 2048, 1 << 14
#: By the ends of fields' names.
_LIMITS = (
    (re.compile(r"(?:^|_)(?:layers?|blocks)$"), MAX_LAYERS),
    (re.compile(r"(?:^|_)experts$"), MAX_EXPERTS),
)
#: The least bits of a stored number.
LEAST_BITS = 4
_BITS = re.compile(r"\d+")
#: The most characters of a field's path that a refusal repeats.
MAX_SHOWN = 100


def refuse_limitless(config: Mapping[str, Any]) -> None:
    """Refuse integers beyond the limits, and values that are too many or nested too deep.

    Args:
        config: the JSON object of config.json.

    Raises:
        ModelRefused: names the field.
    """
    left: list[tuple[tuple[str, ...], Any]] = [((), config)]
    count = 0
    while left:
        path, value = left.pop()
        count += 1
        if count + len(left) > MAX_VALUES:
            raise _refused(path, f"is one of more than {MAX_VALUES} values")
        if len(path) > MAX_DEPTH:
            raise _refused(path, f"nests values in more than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            left += [((*path, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [((*path, str(place)), inner) for place, inner in enumerate(value)]
        elif type(value) is int and value > (limit := _limit_of(path)):
            raise _refused(path, f"is {value}; at most {limit} is read")


def refuse_more_numbers(
    model_class: Any, config: Any, tensors: Iterable[StoredTensor], path: str | Path
) -> None:
    """Refuse a model with more numbers than the bits of a checkpoint can have.

    They would be missing, or of another shape, and transformers would make them before it says so.
    A model that cannot be made without memory is left to transformers.

    Args:
        model_class: that of transformers.
        config: its configuration.
        tensors: all that the checkpoint stores.
        path: the folder or name of the model, for the message.
    """
    try:
        with torch.device("meta"):
            parameters = {
                name: tuple(one.shape)
                # transformers writes into a configuration.
                for name, one in model_class(copy.deepcopy(config)).named_parameters()
            }
    except Exception:  # noqa: BLE001  It raises it again when it loads the weights.
        return
    numbers = sum(map(prod, parameters.values()))
    bits = sum(prod(tensor.shape) * _bits_of(tensor) for tensor in tensors)
    if numbers * LEAST_BITS > bits:
        largest = max(parameters, key=lambda name: prod(parameters[name]))
        raise ModelRefused(
            f"the weights of {path} do not fit config.json: they have {bits // 8} bytes, and the "
            f"model needs {numbers} numbers, {largest} {list(parameters[largest])} among them: use "
            "config.json and weights of the same checkpoint"
        )


def _limit_of(path: tuple[str, ...]) -> int:
    name = next((name for name in reversed(path) if not name.isdecimal()), "")
    return min([MAX_INTEGER, *(limit for pattern, limit in _LIMITS if pattern.search(name))])


def _bits_of(tensor: StoredTensor) -> int:
    found = _BITS.search(tensor.dtype)
    return int(found[0]) if found else 8


def _refused(path: tuple[str, ...], what: str) -> ModelRefused:
    field = ".".join(path)
    shown = field if len(field) <= MAX_SHOWN else f"{field[:MAX_SHOWN]}…"
    return ModelRefused(f"config.json is not usable: {shown} {what}")
