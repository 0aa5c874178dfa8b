"""CPU seconds of a test run by folder, beside the budgets of CONTRIBUTING.

It counts the tests and all processes that they start: workers, servers, subprocesses. A process
counts for the file that runs while it computes. Wall time says little on a machine that has other
work; the sum of CPU seconds divided by the cores is what a run cannot be faster than.
"""

import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
COLLECTION = "collection, in each process"
_ROW = re.compile(
    r"^\| ((?:`tests/\w+`(?:, )?)+|collection, in each process) \| (\d+) \|$", re.MULTILINE
)


def budgets(page: str) -> dict[tuple[str, ...], int]:
    """CPU seconds by row of the table, whose key is a row's folders, or `COLLECTION`."""
    return {
        tuple(re.findall(r"`(tests/\w+)`", row)) or (COLLECTION,): int(seconds)
        for row, seconds in _ROW.findall(page)
    }


def table(spent: Counter[str], page: str, processes: int) -> list[str]:
    """One line for each budget of which anything was spent; `spent` is by folder."""
    lines = []
    for names, budget in budgets(page).items():
        seconds = sum(spent[name] for name in names)
        if names == (COLLECTION,):
            seconds /= processes
        if seconds >= 0.5:
            over = "  OVER BUDGET" if seconds > budget else ""
            lines.append(f"{seconds:6.0f} of {budget:3d} s  {', '.join(names)}{over}")
    missing = set(spent) - {name for names in budgets(page) for name in names}
    lines += [f"{spent[name]:6.0f} s, no budget  {name}" for name in sorted(missing)]
    return lines


def cpu_seconds() -> float:
    """Of this process and all below it, also of those that have ended and were waited for."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


class CpuTime:
    """A plugin for each process of a run; the one that prints gets the sums of the others."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._processes = 0
        self._before = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # The process that only distributes the tests has collected none.
        if session.items:
            self._before = cpu_seconds()
            self._spent[COLLECTION] += self._before
            self._processes += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._add(item.nodeid)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self._spent)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Of xdist: a process has ended."""
        spent = getattr(node, "workeroutput", {}).get("cpu_seconds", {})
        self._spent.update(spent)
        self._processes += bool(spent)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._processes and terminalreporter.verbosity >= 0:
            page = CONTRIBUTING.read_text(encoding="utf-8")
            terminalreporter.section("CPU seconds by folder")
            for line in table(self._spent, page, self._processes):
                terminalreporter.line(line)
            total = sum(self._spent.values())
            terminalreporter.line(f"{total:6.0f} s in {self._processes} processes")

    def _add(self, nodeid: str) -> None:
        now = cpu_seconds()
        self._spent["/".join(nodeid.split("/")[:2])] += now - self._before
        self._before = now
