"""Writes quire/wire/sampling_fields.py: `python -m ops.pages.sampling_types`."""

import json
import sys
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from quire.wire.sampling import SamplingParams

#: What a validator accepts beside the type of the field.
_ALSO = {"json_schema": "type[Any]", "stop": "str"}

_HEAD = '''\
# Generated from SamplingParams by `python -m ops.pages.sampling_types`: change that class.
"""The sampling parameters as keyword arguments, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams, each with the type that a caller may give."""

'''


def render_python() -> str:
    """quire/wire/sampling_fields.py, whole."""
    lines = []
    for name, field in SamplingParams.model_fields.items():
        lines += [f"    #: {field.description}", f"    {name}: {_given(name, field.annotation)}"]
    return _HEAD + "\n".join(lines) + "\n"


def _given(name: str, annotation: Any) -> str:
    return " | ".join([_ALSO[name], _type(annotation)] if name in _ALSO else [_type(annotation)])


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "None"
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_type, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if origin is tuple:
        return f"Sequence[{_type(arguments[0])}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(_type, arguments))}]"
    return "Any" if annotation is Any else str(annotation.__name__)


if __name__ == "__main__":
    sys.stdout.write(render_python())
