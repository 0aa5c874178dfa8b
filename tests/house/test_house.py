"""The house rules that no linter knows: sizes, registers, and what may never be written down."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
#: Functions that are promised to fit a screen.
ONE_SCREEN = {("engine/engine.py", "step"): 30, ("service/worker/process/worker.py", "run"): 40}


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_longer_than_a_reader_can_hold():
    # The changelog is looked up by release, and only grows.
    files = {*tracked("*.py", "*.lua", "*.cpp", "*.h", "*.md")} - {ROOT / "CHANGELOG.md"}
    long = {p.name: n for p in files if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    assert long == {}


def test_no_function_is_longer_than_a_screen_and_a_half():
    long = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in tracked("*.py")
        for name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    }
    assert long == {}


def names_of_two_classes(package: Path) -> set[str]:
    """The public classes that more than one module of a package defines under the same name."""
    names = Counter(
        node.name
        for path in package.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name for name, count in names.items() if count > 1}


@pytest.mark.parametrize("package", ["quire", "engine", "service"])
def test_no_two_classes_of_a_package_have_one_name(package):
    assert names_of_two_classes(ROOT / package) == set()


def test_two_classes_of_one_name_are_found(tmp_path):
    (tmp_path / "one.py").write_text("class Turn: pass\nclass _Own: pass\n")
    (tmp_path / "two.py").write_text("class Turn: pass\nclass _Own: pass\n")
    assert names_of_two_classes(tmp_path) == {"Turn"}


@pytest.mark.parametrize(("where", "most"), ONE_SCREEN.items(), ids=str)
def test_the_page_that_tells_the_story_fits_a_screen(where, most):
    file, name = where
    (lines,) = [lines for found, lines in functions(ROOT / file) if found == name]
    assert lines <= most


def test_every_file_that_a_run_begins_with_is_there():
    assert [name for name in LONG_FILES if not (ROOT / name).exists()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)


#: The import rules that list the rooms of the service, and which rooms may import what they forbid.
LISTING_RULES = {
    "8.": {
        *("service.batcher", "service.exporter", "service.gateway", "service.notifier"),
        *(f"service.shared.{name}" for name in ("credentials", "families", "instruments")),
        *(f"service.shared.{name}" for name in ("logs", "model_table", "probes", "tenants")),
        "service.worker.observe",
    },
    "9.": {"service.worker.incoming", "service.worker.model"},
}
#: The most modules that a folder holds. Not a reason to divide what is one thing.
MAX_MODULES = 30


@pytest.mark.parametrize("rule", LISTING_RULES)
def test_an_import_rule_that_lists_rooms_lists_them_all(rule):
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    listed = next(c for c in linter["contracts"] if c["name"].startswith(rule))["source_modules"]
    exempt = LISTING_RULES[rule]
    rooms = rooms_of("service") - {"service.worker", "service.shared"}
    rooms |= rooms_of("service.worker") | rooms_of("service.shared")
    if "service.shared" in listed:
        listed = [*{*listed} - {"service.shared"}, *rooms_of("service.shared")]
    assert exempt < rooms
    assert set(listed) == rooms - exempt


def rooms_of(package):
    return {
        f"{package}.{path.stem}"
        for path in (ROOT / package.replace(".", "/")).glob("[!_]*")
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def test_no_folder_has_more_modules_than_a_reader_can_survey():
    folders = Counter(path.parent.relative_to(ROOT) for path in tracked("*.py"))
    assert {str(folder): n for folder, n in folders.items() if n > MAX_MODULES} == {}


def test_nothing_outside_the_project_is_written_down():
    """Machine paths and package hosts have no place in a project that others clone."""
    forbidden = re.compile(r"/(?:work|farm)/|\b(?:pypi|pythonhosted)\.org|download\.pytorch")
    offenders = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix not in {".safetensors", ".bin"} and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert offenders == []


def test_the_pinned_versions_satisfy_every_range():
    # vLLM pins other versions, and has a file of its own.
    lines = [
        *(ROOT / "constraints.txt").read_text().splitlines(),
        *re.findall("^vllm==.*", (ROOT / "constraints-gpu-vllm.txt").read_text(), re.MULTILINE),
    ]
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *chain.from_iterable(extras)]:
        needed, _, _where = requirement.partition(";")
        name, _, least = re.sub(r"\[.*\]", "", needed).partition(">=")
        if name != project["name"]:
            assert version(pinned[name.lower()]) >= version(least), name


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+", maxsplit=1)[0]))


@pytest.mark.parametrize("module", ["quire", "service.worker.settings.config", "engine.engine"])
def test_importing_a_room_that_computes_nothing_costs_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
