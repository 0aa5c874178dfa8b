"""A parser of command lines whose usage line names the required arguments only.

Needs the standard library only, so that benchmarks without a queue can use it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

#: Has the words with which a person has started a program, for its usage line. It is no setting.
COMMAND_VARIABLE = "_QUIRE_COMMAND"
#: Patterns of secrets in urls, with their replacements. They also match malformed urls: a url that
#: was put in the wrong argument may be misspelt as well.
_SECRETS = (
    # User and password after one or more slashes, then without slashes. The first pattern matches
    # only the first url of the text: to start at each url would be slow for many urls.
    (re.compile(r"\A((?>.*?:/+)).*(?=@)", re.DOTALL), r"\1***"),
    (re.compile(r"(?<![^\s'=])[^\s'=:]*:(?!/)[^\s']+(?=@)"), "***"),
    # A password without a host after it. A number that could be a port, after a name, is kept.
    (
        re.compile(
            r"((?:redis|unix)[a-z+]{0,16}:/*(?:|[^:/?\s\[@']+(?!:\d{1,5}(?:[/?,\s']|$))):)"
            # The url ends at the closing quote of argparse's message.
            r".*?(?='(?: \(|$)|$)",
            re.DOTALL | re.IGNORECASE,
        ),
        r"\1***",
    ),
    # The password of the sentinels.
    (re.compile(r"(?<=password=)[^&\s']*"), "***"),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short usage line, which it also prints with an error."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": _ShortUsage, **settings})
        # From Python 3.14 on, it would colour what it prints by sequences that a `Terminal` shows.
        self.color = False

    def error(self, message: str) -> NoReturn:
        """Exits with the usage and the message, without the passwords of urls in the message."""
        super().error(without_secrets(message))


def without_secrets(message: str) -> str:
    """The message without the passwords of urls in it."""
    for secret, instead in _SECRETS:
        message = secret.sub(instead, message)
    return message


def positive(text: str) -> int:
    """The type of a flag that is an integer from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def limit(text: str) -> int:
    """The type of a flag that is a limit, in the unit of its metavar or of its help."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0")
    return int(text)


class _ShortUsage(argparse.HelpFormatter):
    """Prints `[options]` for all optional arguments: argparse does not wrap a long group."""

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
