"""Writes docs/reference/cli.md from the parsers of the command: `python -m ops.pages.cli_page`.

Defaults are those that the help of a flag names: the parsers themselves have those of the
environment.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator

from quire.cli.verbs import VERBS, Verb

#: The flags of nearly all verbs, listed once.
QUEUE_FLAGS = ("--redis-url", "--queue", "--shards", "--json")
#: The programs that a verb passes its arguments on to.
_PROGRAMS = {
    "worker": "`python -m service`, which has [these settings](configuration.md#worker) as flags",
    "gateway": "`python -m service.gateway`, which has [these](configuration.md#gateway) as flags",
    "console": "`python -m service.console`, which has [these](configuration.md#console) as flags",
    "batcher": "`python -m service.batcher`, which has [these](configuration.md#batcher) as flags",
    "notifier": "`python -m service.notifier`, "
    "which has [these](configuration.md#notifier) as flags",
    "exporter": "`python -m service.exporter`, "
    "which has [these](configuration.md#exporter) as flags",
    "config": "`python -m service.worker.settings.show`, after the word `show`. Its flags are "
    "`--origin`, for the source of each setting, `--json`, and all flags of a worker",
    "demo": "`python -m examples.demo`: `--model smollm2` for chats with a real model",
}


def render_markdown() -> str:
    """docs/reference/cli.md, whole."""
    lines = [
        "# The command",
        "",
        "Generated from the parsers by `python -m ops.pages.cli_page`; do not edit.",
        "",
        "The flag `--help` of a verb prints the same. Defaults are in brackets.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | success |",
        "| 1 | failure |",
        "| 2 | wrong usage |",
        "| 3 | some items failed |",
        "| 130 | interrupted |",
        "",
        "Results go to stdout, with `--json` as one record per line. All else goes to stderr.",
        "",
        "## Flags of the queue",
        "",
        "The password has no flag: set `QUIRE_REDIS_PASSWORD` or `QUIRE_REDIS_PASSWORD_FILE`.",
        "All but `--json` can be set in [quire.toml](configuration.md#the-quire-command), too.",
        "",
    ]
    status = next(verb for verb in VERBS if verb.name == "status")
    lines += _table(one for one in _parser(status)._actions if _is_shared(one))
    for verb in VERBS:
        if not verb.passes_on:
            what = f"{verb.help[0].upper()}{verb.help[1:]}."
            lines += ["", f"## quire {verb.name}", "", what, "", *_section(_parser(verb))]
    lines += ["", "## Programs", "", "These verbs pass all their arguments on to a program.", ""]
    lines += ["| verb | what it does | program |", "|---|---|---|"]
    for verb in VERBS:
        if verb.passes_on:
            lines.append(f"| `quire {verb.name}` | {verb.help} | {_PROGRAMS[verb.name]} |")
    return "\n".join(lines) + "\n"


def _parser(verb: Verb) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    getattr(importlib.import_module(f"quire.cli.{verb.module}"), f"add_{verb.function}")(parser)
    return parser


def _section(parser: argparse.ArgumentParser) -> list[str]:
    """The table of a verb, or one for each of its actions."""
    lines: list[str] = []
    for one in parser._actions:
        if isinstance(one, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in one._choices_actions}
            for name, action in one.choices.items():
                lines += [f"**`{name}`**: {helps[name]}.", "", *_section(action), ""]
            return lines[:-1]
    own = [one for one in parser._actions if not _is_shared(one) and one.dest != "help"]
    lines += [*_table(own), ""] if own else []
    shared = [flag for one in parser._actions if _is_shared(one) for flag in one.option_strings]
    if not shared:
        return lines[:-1]
    also = "the [flags of the queue](cli.md#flags-of-the-queue)" if len(shared) > 1 else "`--json`"
    return [*lines, f"{'Also' if own else 'Only'} {also}."]


def _is_shared(action: argparse.Action) -> bool:
    return any(flag in QUEUE_FLAGS for flag in action.option_strings)


def _table(actions: Iterable[argparse.Action]) -> list[str]:
    return ["| argument | meaning |", "|---|---|", *map(_row, actions)]


def _row(action: argparse.Action) -> str:
    if action.help is None:
        raise ValueError(f"{action.dest} has no help")
    needed = "; required" if action.required and action.option_strings else ""
    forms = ", ".join(f"`{form}`" for form in _forms(action))
    return f"| {forms} | {action.help.replace('|', chr(92) + '|').replace('%%', '%')}{needed} |"


def _forms(action: argparse.Action) -> Iterator[str]:
    """How an argument is typed: a word, or its flags with the name of their value."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else None
    value = choices or action.metavar or action.dest.upper()
    if not action.option_strings:
        many = {"+": f"{value}...", "*": f"[{value}...]", "?": f"[{value}]"}
        yield many.get(str(action.nargs), str(value))
        return
    plural = "..." if action.nargs == "+" else ""
    for flag in action.option_strings:
        yield flag if action.nargs == 0 else f"{flag} {value}{plural}"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
