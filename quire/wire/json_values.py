"""Converts records to what JSON can hold, for people and for programs that are not ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Converts to JSON's types: records to maps, enums to names, bytes to text, `raw` to numbers.

    NaN and Infinity become null: metadata and log-probabilities of a message may contain them.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        values = {field.name: getattr(value, field.name) for field in fields}
        return {name: [*one] if name == "raw" else plain(one) for name, one in values.items()}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
