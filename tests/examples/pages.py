"""What tests of pages share: their programs and commands, typed on a server of the test."""

import re
import shlex
from pathlib import Path

from quire.cli import main
from tests.service.builders import CHECKOUT
from tests.service.processes import LoggedProcess

HOW_TO = CHECKOUT / "docs" / "how-to"
#: The addresses in every example.
REDIS, GATEWAY = "redis://127.0.0.1:6379/0", "http://127.0.0.1:10402"


def page(name: str) -> str:
    """The text of a how-to page."""
    return (HOW_TO / f"{name}.md").read_text(encoding="utf-8")


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of one language, in their order; `""` for those without a name."""
    found = re.findall(r"^ *```([\w-]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def commands(text: str, language: str = "") -> list[str]:
    """The lines of these blocks, without the remarks behind them."""
    lines = [line for block in blocks(text, language) for line in block.splitlines()]
    return [line.split("  #", maxsplit=1)[0].strip() for line in lines]


def command(text: str, beginning: str, language: str = "") -> str:
    """The one command that begins so."""
    (found,) = [line for line in commands(text, language) if line.startswith(beginning)]
    return found


def process(line: str, *more: str, folder: Path | None = None) -> LoggedProcess:
    """The process of a line `quire <program> <flags>`, with more flags behind those."""
    quire, program, *flags = shlex.split(line)
    assert quire == "quire"
    module = "service" if program == "worker" else f"service.{program}"
    if folder is not None:
        flags = [str(folder / flag) if (folder / flag).exists() else flag for flag in flags]
    return LoggedProcess(module, *flags, *more)


def typed(line: str) -> int:
    """Runs a line `quire <verb> …` in this process; returns its exit code."""
    quire, *arguments = shlex.split(line)
    assert quire == "quire"
    return main(arguments)
