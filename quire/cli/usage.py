"""Command lines whose usage fits a terminal: it names what must be given, and the rest below."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

#: What nobody may read of a url, whatever characters it has, and what stands there instead. Whoever
#: writes one in the wrong place may have written it wrong as well.
_SECRETS = (
    # User and password, behind two slashes or one; and behind none. The first url is enough: to
    # begin at each would take long where there are many.
    (re.compile(r"\A((?>.*?:/+)).*(?=@)", re.DOTALL), r"\1***"),
    (re.compile(r"(?<![^\s'=])[^\s'=:]*:(?!/)[^\s']+(?=@)"), "***"),
    # A password without a host behind it. What follows a name, and could be a port, is one.
    (
        re.compile(
            r"((?:redis|unix)[a-z+]{0,16}:/*(?:|[^:/?\s\[@']+(?!:\d{1,5}(?:[/?,\s']|$))):)"
            # The value ends where the quote of argparse does.
            r".*?(?='(?: \(|$)|$)",
            re.DOTALL | re.IGNORECASE,
        ),
        r"\1***",
    ),
    # The password of the sentinels.
    (re.compile(r"(?<=password=)[^&\s']*"), "***"),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short usage, which is also what a mistake is answered with."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": _ShortUsage, **settings})

    def error(self, message: str) -> NoReturn:
        """Ends with a usage; a password in a url that stands where none belongs is not repeated."""
        for secret, instead in _SECRETS:
            message = secret.sub(instead, message)
        super().error(message)


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
