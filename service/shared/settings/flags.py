"""What a process says of its settings: its command line, and its tables of the settings page."""

import argparse
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from quire.cli.usage import Parser


def make_parser(
    fields: Mapping[str, FieldInfo], *, program: str, purpose: str, prefix: str
) -> argparse.ArgumentParser:
    """A parser with one flag per field; flags that are not given are absent from the result."""
    parser = Parser(
        prog=program,
        description=purpose,
        epilog=f"Each flag can also be set as {prefix}<NAME> or in quire.toml; flags win.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in fields.items():
        if SecretStr in get_args(field.annotation):
            continue
        section = _section(field)
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        flag = "--" + name.replace("_", "-")
        text = f"{field.description} [{_default_text(field)}]".replace("%", "%%")
        if field.annotation is bool:
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif get_origin(field.annotation) is dict:
            groups[section].add_argument(flag, action="append", metavar="NAME=VALUE", help=text)
        else:
            choices = _choices(field) or None
            metavar = None if choices else _type_text(field).upper()
            groups[section].add_argument(flag, choices=choices, metavar=metavar, help=text)
    return parser


def markdown_tables(fields: Mapping[str, FieldInfo]) -> list[str]:
    """The lines of docs/reference/configuration.md for one process: a table for each section."""
    tables: dict[str, list[str]] = {}
    for name, field in fields.items():
        row = [f"`{name}`", _type_text(field), _default_text(field), field.description]
        line = f"| {' | '.join(str(cell) for cell in row)} |"
        tables.setdefault(_section(field), []).append(line)
    lines: list[str] = []
    for section, rows in tables.items():
        lines += ["", f"### {section}", ""]
        lines += ["| name | type | default | meaning |", "|---|---|---|---|", *rows]
    return lines


def _section(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["section"])


def _default_text(field: FieldInfo) -> str:
    if field.default in (None, "", (), {}):
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return ",".join(field.default)
    return str(field.default)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a Literal allows, or one that may be None; empty for every other type."""
    for kind in (field.annotation, *get_args(field.annotation)):
        options = get_args(kind)
        if options and all(isinstance(option, str) for option in options):
            return options
    return ()


def _type_text(field: FieldInfo) -> str:
    if choices := _choices(field):
        return ", ".join(choices)
    if get_origin(field.annotation) is tuple:
        return "list"
    if get_origin(field.annotation) is dict:
        return "table"
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds else field.annotation
    names = {SecretStr: "secret", bool: "flag", int: "integer", float: "number", str: "text"}
    return names.get(kind, "path")
