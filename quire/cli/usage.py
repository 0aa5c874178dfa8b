"""Command lines whose usage fits a terminal: it names what must be given, and the rest below."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

#: What nobody may read of a url, whatever characters it has: user and password, and the password of
#: the sentinels.
_SECRETS = re.compile(r"(?<=://).*(?=@)|(?<=password=)[^&\s']*", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short usage, which is also what a mistake is answered with."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": _ShortUsage, **settings})

    def error(self, message: str) -> NoReturn:
        """Ends with a usage; a password in a url that stands where none belongs is not repeated."""
        super().error(_SECRETS.sub("***", message))


class _ShortUsage(argparse.HelpFormatter):
    """Says `[options]` for all that may be left out: argparse breaks no line inside a group."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if any(action.dest != "help" for action in actions if action not in needed):
            needed.insert(0, argparse.Action([], "options", metavar="[options]"))
        super().add_usage(usage, needed, groups, prefix)
