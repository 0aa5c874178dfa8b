"""Which reasoning an answer may have, and whether the caller gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.openai.tools.formats import REASONING_FORMATS, ReasoningFormat

#: All formats by their marks; no format; or only the named one.
ReasoningSetting = Literal[
    "auto", "none", "think", "mistral", "seed", "command", "granite", "harmony"
]


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """The names of the formats that an output may begin with.

    Without any, marks of reasoning are content. `is_shown`: the caller gets the reasoning.
    """

    names: tuple[str, ...] = ()
    is_shown: bool = True

    @property
    def formats(self) -> tuple[ReasoningFormat, ...]:
        """The formats of these names; unknown names are ignored."""
        return tuple(one for one in REASONING_FORMATS if one.name in self.names)


#: No reasoning is told apart.
NO_REASONING = ReasoningUse()
#: What holds for a caller that has set nothing.
DEFAULT_REASONING = ReasoningUse(tuple(one.name for one in REASONING_FORMATS if not one.asked_by))


def reasoning_use_of(
    body: Mapping[str, Any], *, setting: ReasoningSetting = "auto"
) -> ReasoningUse:
    """The reasoning that the answer to a chat may have. The body has been checked."""
    is_shown = body.get("include_reasoning") is not False
    if setting == "none":
        return NO_REASONING
    if setting != "auto":
        return ReasoningUse((setting,), is_shown)
    given = body.get("chat_template_kwargs")
    variables = given if isinstance(given, Mapping) else {}
    names = (
        one.name
        for one in REASONING_FORMATS
        if not one.asked_by or variables.get(one.asked_by) is True
    )
    return ReasoningUse(tuple(names), is_shown)


def reasoning_fields(use: ReasoningUse) -> dict[str, Any]:
    """The fields of a call's record about its reasoning."""
    if not use.names:
        return {}
    return {"reasoning": list(use.names)} | ({} if use.is_shown else {"hides_reasoning": True})


def reasoning_use_from(fields: Mapping[str, Any]) -> ReasoningUse:
    """Reads these fields back."""
    names = fields.get("reasoning")
    if not isinstance(names, Sequence) or isinstance(names, str):
        return NO_REASONING
    return ReasoningUse(tuple(map(str, names)), fields.get("hides_reasoning") is not True)
