"""A whole schema, to which the references in its parts refer, and how much work it may still cause.

References can double at each level, so what is asked of the parts of a schema has a limit for the
whole. Knows no library.
"""

from collections.abc import Mapping
from typing import Any

from quire.wire.constraints import resolve

#: The most parts that are compared or negated, each counted as often as it is. This takes some
#: tenths of a second.
MAX_STEPS = 50_000


class Whole:
    """The schema of a constraint."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._num_left = MAX_STEPS

    def resolve(self, reference: str) -> Any:
        """The schema that a reference refers to; None if there is none, or if it is no pointer."""
        is_pointer = reference == "#" or reference.startswith("#/")
        return resolve(self._schema, reference) if is_pointer else None

    def may_go_on(self) -> bool:
        """Whether there is work left for one more part; counts it."""
        self._num_left -= 1
        return self._num_left >= 0
