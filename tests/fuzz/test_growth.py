"""What a caller sends costs time in proportion to its size, or is refused by a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import growth
from tests.fuzz.growth import FAMILIES, MOST_GROWTH, MOST_SECONDS, Family, growth_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "limits.md"
#: The tests try a part of what a limit lets through; the command tries all of it.
PART = 8


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sent_costs_no_more_than_in_proportion(name: str):
    family = FAMILIES[name]
    seconds, power = growth_of(family, family.largest // PART)
    assert seconds < MOST_SECONDS / PART
    assert power <= MOST_GROWTH


def test_the_page_of_limits_has_a_row_for_each():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {4}
    assert set(FAMILIES) <= {row[0].removeprefix("| ") for row in rows}


def test_the_clock_notices_what_grows_faster():
    square = Family(lambda size: lambda: [0 for _ in range(size * size)], 1 << 12)
    seconds, power = growth_of(square, square.largest)
    assert seconds > 0.0
    assert power > MOST_GROWTH


def test_the_command_says_what_is_too_much(monkeypatch, capsys):
    square = Family(lambda size: lambda: [0 for _ in range(size * size)], 1 << 12)
    few = {"a square": square, "a model of colons": FAMILIES["a model of colons"]}
    monkeypatch.setattr(growth, "FAMILIES", few)
    assert growth.main() == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a square") and first.endswith("TOO MUCH")
    assert second.startswith("a model of colons") and not second.endswith("TOO MUCH")
