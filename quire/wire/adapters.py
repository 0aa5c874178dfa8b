"""Which adapter a request asks for: what a caller may write, and how a worker reads it.

The field `adapter` of a body names one. OpenAI's callers can only say which model they want, so
that may be `<model>:<adapter>`. A model whose own name holds a colon comes first: who serves a
model knows its name, and takes apart no other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.refusals import nearest

#: What an adapter may be called, as queues and tenants are; a colon parts it from its model.
ADAPTER_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

#: Stands between the name of a model and that of an adapter.
ADAPTER_SEPARATOR = ":"

_NAME = re.compile(ADAPTER_PATTERN)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter that a request asks for.

    Args:
        name: its name.
        field: of the body, where the caller has said so.
    """

    name: str
    field: str

    def refusal(self, known: Collection[str]) -> InvalidRequest:
        """What whoever has only the `known` ones says to a request for this one."""
        hint = nearest(self.name, known)
        return InvalidRequest(self.field, f"this worker has no adapter {self.name!r}{hint}")


def is_adapter_name(name: object) -> bool:
    """Whether an adapter can be called so."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def named_adapter(body: Mapping[str, Any]) -> str | None:
    """The field `adapter` of a body. InvalidRequest if it is no name."""
    name: str | None = body.get("adapter")
    if name is not None and not is_adapter_name(name):
        raise InvalidRequest("body.adapter", "must be 1 to 64 of A-Z a-z 0-9 . _ -")
    return name


def adapter_of(body: Mapping[str, Any], *, model: str) -> Adapter | None:
    """The adapter that a body asks for from whoever serves `model`; None for the model alone.

    InvalidRequest for another model, for what is no name, and for two adapters at once.
    """
    asked, name = body.get("model"), named_adapter(body)
    if asked in (None, model):
        return None if name is None else Adapter(name, "body.adapter")
    if not isinstance(asked, str):
        raise InvalidRequest("body.model", "must be a string")
    owner, _, suffix = asked.rpartition(ADAPTER_SEPARATOR)
    if owner != model or not is_adapter_name(suffix):
        raise InvalidRequest("body.model", f"this worker serves {model!r}, not {asked!r}")
    if name not in (None, suffix):
        raise InvalidRequest("body.adapter", f"the model already names the adapter {suffix!r}")
    return Adapter(suffix, "body.model")


def name_with(model: str, adapter: str | None) -> str:
    """How a model is called together with an adapter."""
    return model if adapter is None else f"{model}{ADAPTER_SEPARATOR}{adapter}"
