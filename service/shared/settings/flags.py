"""The command line of a process, with a flag for each of its settings."""

import argparse
import os
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from quire.cli.usage import COMMAND_VARIABLE, Parser

#: The fields of each section.
Sections = Mapping[str, Mapping[str, FieldInfo]]


def make_parser(
    sections: Sections, *, program: str, purpose: str, prefix: str
) -> argparse.ArgumentParser:
    """A parser with one flag per field; flags that are not given are absent from the result."""
    parser = Parser(
        prog=os.environ.get(COMMAND_VARIABLE, program),
        description=purpose,
        epilog=f"Each flag can also be set as {prefix}<NAME> or in quire.toml; flags win.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for section, fields in sections.items():
        group = parser.add_argument_group(section)
        for name, field in fields.items():
            if SecretStr not in get_args(field.annotation):
                _add_flag(group, "--" + name.replace("_", "-"), field)
    return parser


def _add_flag(group: argparse._ArgumentGroup, flag: str, field: FieldInfo) -> None:
    text = f"{field.description} [{default_text(field)}]".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(field.annotation) is dict:
        group.add_argument(flag, action="append", metavar="NAME=VALUE", help=text)
    else:
        choices = _choices(field) or None
        metavar = None if choices else type_text(field).upper()
        group.add_argument(flag, choices=choices, metavar=metavar, help=text)


def default_text(field: FieldInfo) -> str:
    """The default as help and documentation show it."""
    if field.default in (None, "", (), {}):
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return ",".join(field.default)
    return str(field.default)


def type_text(field: FieldInfo) -> str:
    """The type as help and documentation show it: a word, or the words that may be chosen."""
    if choices := _choices(field):
        return ", ".join(choices)
    if get_origin(field.annotation) is tuple:
        return "list"
    if get_origin(field.annotation) is dict:
        return "table"
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds else field.annotation
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    names = {SecretStr: "secret", bool: "flag", int: "integer", float: "number", str: "text"}
    return names.get(kind, "path")


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a Literal allows, or one that may be None; empty for every other type."""
    for kind in (field.annotation, *get_args(field.annotation)):
        options = get_args(kind)
        if options and all(isinstance(option, str) for option in options):
            return options
    return ()
