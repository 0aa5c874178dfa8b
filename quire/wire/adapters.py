"""Which adapter a request names: what a caller may write, and how a worker reads it.

The field `adapter` of a body names one. OpenAI's API has only the field `model`, so that may also
be `<model>:<adapter>`. A model's own name may contain a colon: a worker knows the name of its
model, and splits a name only if the part before the last colon is that name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.refusals import nearest

#: The name of an adapter, as for queues and tenants. It has no colon: that is the separator.
ADAPTER_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

#: Separates the name of a model from that of an adapter.
ADAPTER_SEPARATOR = ":"

_NAME = re.compile(ADAPTER_PATTERN)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter that a request names.

    Args:
        name: its name.
        field: the field of the body that names it.
    """

    name: str
    field: str

    def refusal(self, known: Collection[str]) -> InvalidRequest:
        """The error of a worker that has only the `known` adapters."""
        hint = nearest(self.name, known)
        return InvalidRequest(self.field, f"this worker has no adapter {self.name!r}{hint}")


def is_adapter_name(name: object) -> bool:
    """Whether `name` is a valid name of an adapter."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def named_adapter(body: Mapping[str, Any]) -> str | None:
    """The field `adapter` of a body, or None. InvalidRequest if it is not a valid name."""
    name: str | None = body.get("adapter")
    if name is not None and not is_adapter_name(name):
        raise InvalidRequest("body.adapter", "must be 1 to 64 of A-Z a-z 0-9 . _ -")
    return name


def adapter_of(body: Mapping[str, Any], *, model: str) -> Adapter | None:
    """The adapter that a body names, read by a worker that serves `model`; None for no adapter.

    InvalidRequest for another model, for an invalid name, and for two different adapters.
    """
    requested, name = body.get("model"), named_adapter(body)
    if requested in (None, model):
        return None if name is None else Adapter(name, "body.adapter")
    if not isinstance(requested, str):
        raise InvalidRequest("body.model", "must be a string")
    owner, _, suffix = requested.rpartition(ADAPTER_SEPARATOR)
    if owner != model or not is_adapter_name(suffix):
        raise InvalidRequest("body.model", f"this worker serves {model!r}, not {requested!r}")
    if name not in (None, suffix):
        raise InvalidRequest("body.adapter", f"the model already names the adapter {suffix!r}")
    return Adapter(suffix, "body.model")


def name_with(model: str, adapter: str | None) -> str:
    """The name of a model with an adapter: `<model>:<adapter>`, or `<model>` without one."""
    return model if adapter is None else f"{model}{ADAPTER_SEPARATOR}{adapter}"
