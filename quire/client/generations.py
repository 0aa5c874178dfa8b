"""The results of `Client.generate`, one for each prompt, in the order of the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Generic, TypeVar

from quire.errors import QuireError
from quire.wire.output import Completion, shortened

#: The most rows that a notebook shows.
MAX_SHOWN_ROWS = 10

_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True, repr=False)
class Generation(Generic[_Parsed]):
    """What became of the prompt with this index.

    `parsed` is the output as an instance of the schema; None without a schema, or with an error.
    `error` is what `errors="raise"` would have raised. `completion` is the terminal record; None if
    there is none, because the prompt was refused or Redis lost the request.
    """

    index: int
    completion: Completion | None = None
    parsed: _Parsed | None = None
    error: QuireError | None = None

    @property
    def text(self) -> str:
        """The text of the output, also if it is not complete; empty without one."""
        return "" if self.completion is None else self.completion.text

    def __repr__(self) -> str:
        return f"Generation({self.index}, {self._shown()})"

    def _shown(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}({str(self.error)!r})"
        return repr(self.text if self.parsed is None else self.parsed)

    def to_dict(self) -> dict[str, Any]:
        """The fields in the types of JSON; `parsed` as pydantic writes it."""
        from pydantic_core import to_jsonable_python

        return {
            "index": self.index,
            "text": self.text,
            "parsed": to_jsonable_python(self.parsed),
            "error": None if self.error is None else str(self.error),
            "completion": None if self.completion is None else self.completion.to_dict(),
        }


class Generations(list[Generation[_Parsed]]):
    """The results of a run, with the columns that a table wants."""

    @property
    def texts(self) -> list[str]:
        """The text of each output."""
        return [one.text for one in self]

    @property
    def parsed(self) -> list[_Parsed | None]:
        """Each output as an instance of the schema; None for one with an error."""
        return [one.parsed for one in self]

    @property
    def failed(self) -> list[Generation[_Parsed]]:
        """The results with an error."""
        return [one for one in self if one.error is not None]

    def __repr__(self) -> str:
        return f"<Generations: {len(self)} results, {len(self.failed)} failed>"

    def _repr_html_(self) -> str:
        """A table of the first results, for a notebook."""
        rows = "".join(map(_row, self[:MAX_SHOWN_ROWS]))
        head = "<tr><th></th><th>output</th></tr>"
        return f"<table>{head}{rows}</table><p>{escape(repr(self)[1:-1])}</p>"


def _row(one: Generation[Any]) -> str:
    return f"<tr><td>{one.index}</td><td>{escape(shortened(one._shown()))}</td></tr>"
