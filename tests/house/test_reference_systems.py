"""The pages on the reference systems: no row is missing, and every named test exists.

Each law is a function from rows to what is wrong with them, so that a planted mistake shows that it
can be found.
"""

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.test_house import ROOT, tracked

FOLDER = ROOT / "docs" / "reference"
OVERVIEW = FOLDER / "reference-systems.md"
#: The tables of features, and how many rows each has.
NUM_ROWS = {
    "Identity, priority, state and finish reason": 19,
    "The incoming request": 32,
    "The running request": 18,
    "Results, timing and streams": 31,
    "KV cache": 35,
    "Scheduler, plan, batch and budget": 84,
    "Engine configuration and metrics": 17,
    "Further scheduling features": 22,
    "Acceptance cases": 20,
}
STATES = ("works", "renamed", "left out", "open")
#: There is no bug 39.
BUGS = [f"B{number:02}" for number in range(1, 67) if number != 39]
INVARIANTS = [f"{kind}{number}" for kind in "IS" for number in range(1, 9)]


class Row(NamedTuple):
    """A row of a table of features."""

    item: str
    state: str
    here: str
    tests: str


def tables(path: Path) -> dict[str, list[list[str]]]:
    """The cells of each table of a page, without its two lines of headings, by section."""
    found = {}
    for section in path.read_text().split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        rows = [line for line in lines if line.startswith("|")][2:]
        found[heading] = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return found


@cache
def features() -> dict[str, list[Row]]:
    """The rows of the pages of features, by section."""
    pages = sorted(FOLDER.glob("reference-systems-*.md"))
    return {
        heading: [Row(*cells) for cells in rows]
        for page in pages
        for heading, rows in tables(page).items()
    }


def named_tests(cell: str) -> list[str]:
    """The tests that a cell names, without the parameters of one of their cases."""
    return [re.sub(r"\[.*\]$", "", name) for name in re.findall(r"`([^`]*)`", cell)]


@cache
def known_tests() -> frozenset[str]:
    """The ids of all tests of the suite, without parameters."""
    found = []
    for path in tracked("tests/**/test_*.py"):
        where = path.relative_to(ROOT)
        for node in ast.parse(path.read_text()).body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            inside = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
            found += [
                f"{where}::{inside}{member.name}"
                for member in members
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
                and member.name.startswith("test_")
            ]
    return frozenset(found)


@cache
def code() -> tuple[str, ...]:
    """The project's code, one text for each file."""
    return tuple(path.read_text() for path in tracked("engine/*.py", "quire/*.py", "service/*.py"))


@cache
def known_words() -> frozenset[str]:
    """All words of the code, and the metric that a library adds."""
    return frozenset([*re.findall(r"\w+", "\n".join(code())), "process_start_time_seconds"])


@cache
def members() -> dict[str, set[str]]:
    """Classes of the code by name: their fields, methods, attributes and base classes."""
    found: dict[str, set[str]] = {}
    for text in code():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                own = found.setdefault(node.name, set())
                own.update(base.id for base in node.bases if isinstance(base, ast.Name))
                for part in node.body:
                    own.update(names_of(part))
    return found


def names_of(part: ast.stmt) -> list[str]:
    """What a statement of a class's body adds to the class."""
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = [node for node in ast.walk(part) if isinstance(node, ast.Attribute)]
        stored = [node.attr for node in inside if isinstance(node.ctx, ast.Store)]
        return [part.name, *stored]
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def has_member(owner: str, name: str) -> bool:
    """Whether a class or one of its bases has a member of this name."""
    own = members().get(owner, set())
    return name in own or any(has_member(base, name) for base in own & members().keys() - {owner})


def unknown_tests(rows: Iterable[Row]) -> list[str]:
    return [name for row in rows for name in named_tests(row.tests) if name not in known_tests()]


def unknown_states(rows: Iterable[Row]) -> list[str]:
    return [row.item for row in rows if row.state not in STATES]


def without_reason(rows: Iterable[Row]) -> list[str]:
    """What is left out or open needs a sentence."""
    return [
        row.item for row in rows if row.state in ("left out", "open") and not row.here.endswith(".")
    ]


def without_test(rows: Iterable[Row]) -> list[str]:
    return [
        row.item for row in rows if row.state in ("works", "renamed") and not named_tests(row.tests)
    ]


def unknown_names(rows: Iterable[Row]) -> list[str]:
    """Names that are nowhere in the code, and members that their class does not have."""
    spans = [span for row in rows for span in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", row.here)]
    return [
        span
        for span in spans
        if not (has_member(*span.split(".")) if "." in span else span in known_words())
    ]


LAWS: dict[str, Callable[[Iterable[Row]], list[str]]] = {
    "a named test exists": unknown_tests,
    "a state is one of four": unknown_states,
    "what is missing has a reason": without_reason,
    "what is here has a test": without_test,
    "a name of code exists": unknown_names,
}


@pytest.mark.parametrize("law", LAWS)
def test_each_law_holds_for_every_row(law):
    assert {name: wrong for name, rows in features().items() if (wrong := LAWS[law](rows))} == {}


def test_no_row_is_missing_and_none_comes_twice():
    assert {name: len(rows) for name, rows in features().items()} == NUM_ROWS
    for rows in features().values():
        assert len({row.item for row in rows}) == len(rows)


def test_every_bug_has_a_test_and_every_test_with_its_number_is_named():
    rows = tables(OVERVIEW)["Their bugs"]
    assert [bug for bug, _, _ in rows] == BUGS
    named = {bug: named_tests(tests) for bug, _, tests in rows}
    assert set().union(*named.values()) <= known_tests()
    for bug, tests in named.items():
        of_it = {
            name for name in known_tests() if bug.lower() in name.rpartition("::")[2].split("_")
        }
        assert tests == sorted(tests) != [] and of_it <= {*tests}, bug


def test_every_invariant_has_a_test():
    rows = tables(OVERVIEW)["Their invariants"]
    assert [name for name, *_ in rows] == INVARIANTS
    named = [named_tests(tests) for *_, tests in rows]
    assert all(named)
    assert set().union(*named) <= known_tests()


GOOD = "`tests/house/test_reference_systems.py::test_every_invariant_has_a_test`"
PLANTED = [
    Row("right", "works", "`Engine.step`", GOOD),
    Row("a case of a test", "renamed", "`Batch`", GOOD[:-1] + "[1-b]`"),
    Row("no such test", "works", "`Batch`", "`tests/house/test_reference_systems.py::test_none`"),
    Row("no such state", "perhaps", "", GOOD),
    Row("no reason", "left out", "", ""),
    Row("no test", "works", "`Batch`", ""),
    Row("no such member", "works", "`Plan.num_blocks`", GOOD),
    Row("no such name", "works", "`GenerationResult`", GOOD),
]
FOUND = {
    "a named test exists": ["tests/house/test_reference_systems.py::test_none"],
    "a state is one of four": ["no such state"],
    "what is missing has a reason": ["no reason"],
    "what is here has a test": ["no test"],
    "a name of code exists": ["Plan.num_blocks", "GenerationResult"],
}


@pytest.mark.parametrize("law", LAWS)
def test_the_rows_that_break_a_law_are_found_and_no_others(law):
    assert LAWS[law](PLANTED) == FOUND[law]
