"""A plugin of pytest that keeps a file with the outcomes so far: `-p tests.gpu.lease.outcomes`.

A run that is killed has told what it had found by then.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

#: The end of a failure that is kept, and how many failures are.
KEPT_CHARACTERS, MOST_FAILURES = 1500, 40


class Outcomes:
    """Counts the outcomes of tests, and keeps failures and the reasons of skips."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has passed by its call; fixtures only count where they fail or skip.
        if report.passed and report.when != "call":
            return
        self._counts[report.outcome] += 1
        if report.failed:
            if len(self._failures) < MOST_FAILURES:
                self._failures[report.nodeid] = report.longreprtext[-KEPT_CHARACTERS:]
        elif report.skipped:
            self._skips[str(report.longrepr[2])] += 1
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._counts["failed"] += 1
            self._failures[report.nodeid] = str(report.longrepr)[-KEPT_CHARACTERS:]
            self._write()

    def _write(self) -> None:
        names = ("passed", "failed", "skipped")
        record: dict[str, Any] = {name: self._counts[name] for name in names}
        record["headline"] = ", ".join(f"{self._counts[name]} {name}" for name in names)
        record |= {"failures": self._failures, "skips": dict(self._skips)}
        self._path.write_text(json.dumps(record, indent=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="the file that the outcomes are written to")


def pytest_configure(config: pytest.Config) -> None:
    # Where tests run in several processes, the first one hears of them all.
    path: Path | None = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(path))
