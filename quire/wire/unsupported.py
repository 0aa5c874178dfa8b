"""OpenAI's fields that are not supported, and the values with which they change nothing.

Many programs send all fields of that API, so such a field is ignored if its value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from quire.wire.refusals import nearest

#: OpenAI's fields that are not supported, with the values that change nothing and so are accepted.
_NOT_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "tokens": {},
    "completions": {"echo": (False,), "best_of": (1,), "suffix": ()},
    "chat.completions": {
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none",),
        "audio": (),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    },
}


def changes_nothing(kind: str, name: str, value: object) -> bool:
    """Whether an unsupported field has a value without effect. A null means "the default"."""
    harmless = _NOT_SUPPORTED[kind].get(name, ())
    # Types are compared because in Python 1 == True.
    return value is None or any(type(value) is type(one) and value == one for one in harmless)


def why_refused(kind: str, name: str, *, known: Collection[str]) -> str:
    """The message for a field that is unknown or not supported.

    `known` are the names that an unknown one may be meant to be.
    """
    harmless = _NOT_SUPPORTED[kind].get(name)
    if harmless is None:
        return f"unknown field{nearest(name, known)}"
    instead = "".join(f", or set it to {json.dumps(value)}" for value in harmless)
    return f"is not supported: leave it out{instead}"
