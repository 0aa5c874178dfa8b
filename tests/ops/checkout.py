"""Where the files of the operations room are, and the programs that judge them."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
PROMETHEUS = ROOT / "ops" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
GRAFANA = ROOT / "ops" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "quire.json"
RUNBOOK = ROOT / "docs" / "how-to" / "runbook.md"
OPERATE = ROOT / "docs" / "how-to" / "operate.md"


@functools.cache
def load_yaml(path: Path) -> Any:
    """The same objects each time: the tests only read them."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def load_dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    """Every panel that draws something: rows are only titles."""
    return [panel for panel in load_dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    """(name for a test, query) of every target of every panel."""
    return [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in panels()
        for target in panel["targets"]
    ]


def rules(files: Sequence[Path] = RULES) -> list[dict[str, Any]]:
    """Every recording and alerting rule, by default of all files."""
    return [
        rule for path in files for group in load_yaml(path)["groups"] for rule in group["rules"]
    ]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def program(name: str) -> str:
    """The path of a program beside this Python or on PATH; the test is skipped without it."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """The finished command with its output; the caller judges the exit code."""
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
