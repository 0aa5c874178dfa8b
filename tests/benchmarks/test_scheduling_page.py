"""The page about scheduling says what the record of its benchmark says, and nothing else."""

import json
from collections import defaultdict

import pytest

from benchmarks.common.scheduling_page import ASSETS, PAGE, RESULTS, ROOT, page, pictures


def made_up() -> dict:
    """A record in which each figure is another number."""

    class Figures(defaultdict):
        def __missing__(self, name: str) -> float:
            self[name] = 10.0 + len(name) / 8
            return self[name]

    parts = ("sjf", "urgent", "batching", "preemption", "fairness")
    record = {part: Figures() for part in parts}
    return record | {"machine": {"processor": "a processor", "cores": 2}, "model": "TINY"}


def test_a_page_has_a_picture_for_each_link_and_a_link_for_each_picture():
    record = made_up()
    text = page(record)
    assert all(f"../assets/{name}" in text for name in pictures(record))
    assert text.count("../assets/") == len(pictures(record)) == 4


@pytest.mark.parametrize(
    ("part", "name", "shown"),
    [
        ("sjf", "sjf mean of fcfs", "0.41"),
        ("urgent", "steps to the first token", "7 step"),
        ("batching", "continuous of static", "1.73"),
        ("preemption", "swap 1024 ms", "321.5"),
        ("fairness", "fcfs p99 of alone", "98.7"),
    ],
)
def test_the_page_tells_the_figures_of_its_record(part, name, shown):
    record = made_up()
    assert shown not in page(record)
    record[part][name] = float(shown.split()[0])
    assert shown in page(record)


def test_the_page_in_the_docs_is_that_of_the_record_and_is_reached():
    """Without a record there is no page: nothing that was not measured is told."""
    is_reached = [
        "scheduling.md" in (ROOT / name).read_text() for name in ("mkdocs.yml", "docs/README.md")
    ]
    if not RESULTS.exists():
        assert not PAGE.exists() and not any(is_reached)
        return
    record = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == page(record)
    assert all((ASSETS / name).read_text() == text for name, text in pictures(record).items())
    assert all(is_reached)
