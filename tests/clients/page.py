"""The examples of docs/how-to/clients.md, and what each must print."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "clients.md"

_EXAMPLE = re.compile(
    r"<!-- client: (?P<client>.*?) \| (?P<what>.*?) \| prints: (?P<prints>.*?) -->\n"
    r"```(?P<language>js|python)\n(?P<code>.*?)```",
    re.DOTALL,
)


@dataclass(frozen=True)
class Example:
    """One example: the client, what it does, a part of what it prints, and its code."""

    client: str
    what: str
    prints: str
    language: str
    code: str

    def program(self, url: str, model: str) -> str:
        """The code for this gateway and model."""
        return self.code.replace("http://127.0.0.1:10402", url).replace("my-model", model)


def examples(text: str) -> list[Example]:
    """All examples of a page, in their order."""
    return [Example(**found.groupdict()) for found in _EXAMPLE.finditer(text)]
