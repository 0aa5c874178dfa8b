"""Writes events and bodies of responses as JSON, in parts between which others have their turns.

A response has all its log-probabilities in its body and in its last events: tens of megabytes, for
which an encoder that is not interrupted needs seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quire.openai.logprobs import written

#: The list that may be long.
_LONG = "logprobs"

#: The fields on the way to it; all others are encoded at once.
_WAYS = frozenset({"response", "output", "item", "content", "part"})


def written_response(value: Any, *, encode: Callable[[Any], str]) -> Iterator[str]:
    """Yields an event or a body as JSON text. Log-probabilities are encoded some at a time."""
    if isinstance(value, dict):
        comma = "{"
        for name, one in value.items():
            yield f"{comma}{encode(name)}:"
            if name == _LONG and isinstance(one, list):
                yield from written(iter(one), encode=encode)
            elif name in _WAYS:
                yield from written_response(one, encode=encode)
            else:
                yield encode(one)
            comma = ","
        yield "}" if comma == "," else "{}"
    elif isinstance(value, list):
        comma = "["
        for one in value:
            yield comma
            yield from written_response(one, encode=encode)
            comma = ","
        yield "]" if comma == "," else "[]"
    else:
        yield encode(value)
