"""The table of the record says who writes each field; the lists of the scripts come from it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire.queue
from quire.queue.request.status import STATUS_FIELDS, status_of
from quire.record import FIELDS, render_lua
from quire.wire.output import State

FOLDER = Path(quire.queue.__file__).parent
SCRIPTS = {
    file.stem: file.read_text() for file in FOLDER.rglob("*.lua") if file.parent.name != "batches"
}
#: The lists themselves, and the repair, which replaces whatever cannot be read.
NOT_WRITERS = {"record", "condemn"}


def arguments_of_writes(source: str) -> Iterator[list[str]]:
    """The arguments behind the key of each HSET of a record, each as it is written."""
    for begin in re.finditer(r"'HSET', \w+\.record,", source):
        arguments, depth = [""], 0
        for character in source[begin.end() :]:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth < 0:
                break
            if character == "," and not depth:
                arguments.append("")
            else:
                arguments[-1] += character
        yield [argument.strip() for argument in arguments]


def written(source: str) -> set[str]:
    names = (name for arguments in arguments_of_writes(source) for name in arguments[::2])
    return {name.strip("'") for name in names if name.startswith("'")}


@pytest.mark.parametrize("script", sorted(SCRIPTS.keys() - NOT_WRITERS))
def test_a_script_writes_the_fields_that_the_table_says(script):
    said = {field.name for field in FIELDS if script in field.by.split(", ")}
    assert written(SCRIPTS[script]) <= said
    if script == "submit":
        said -= {field.name for field in FIELDS if field.initial is not None}
    assert {name for name in said if f"'{name}'" not in SCRIPTS[script]} == set()


def test_a_field_that_is_not_in_the_table_would_be_noticed():
    source = "redis.call('HSET', keys.record, 'a', int(f(x, 1)),\n  'b', '0', unpack(rest))"
    assert written(source) == {"a", "b"}


def test_the_committed_lists_are_those_of_the_table():
    assert SCRIPTS["record"] == render_lua(), "run: python -m quire.record"


def test_every_field_stands_once():
    names = [field.name for field in FIELDS]
    assert len(set(names)) == len(names)
    assert {field.name for field in FIELDS if field.is_large} == {"metadata", "kept"}


class Noted(dict[bytes, bytes]):
    """A record that notes which of its fields are read."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: bytes) -> bytes:
        self.read.add(name.decode())
        return super().__getitem__(name)

    def get(self, name: bytes, default: Any = None) -> Any:
        self.read.add(name.decode())
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, bytes)
        self.read.add(name.decode())
        return super().__contains__(name)


def test_a_status_asks_for_the_fields_that_it_reads_and_no_others():
    values = dict.fromkeys(STATUS_FIELDS, "1") | {"state": "running", "metadata": ""}
    record = Noted({name.encode(): value.encode() for name, value in values.items()})
    assert status_of("a", record).state is State.RUNNING
    assert record.read == {*STATUS_FIELDS} < {field.name for field in FIELDS}
