"""What the forge reads: workflows, templates, hooks; valid, narrow in their rights, and true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.test_house import ROOT, tracked
from tests.house.test_release import PROJECT

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
PINNED = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.dependabot": [FORGE / "dependabot.yml"],
    "vendor.github-issue-config": [FORGE / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": [
        FORGE / "ISSUE_TEMPLATE" / f"{n}.yml" for n in ("bug", "feature")
    ],
}


def validate(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    command = [program, "--builtin-schema", schema, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_of_the_forge_follows_its_schema_and_a_misspelt_one_does_not(schema, tmp_path):
    done = validate(schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yml"
    text = SCHEMAS[schema][0].read_text()
    (tmp_path / "wrong.yml").write_text(re.sub(r"^(\w[\w-]+):", r"x-\1:", text, flags=re.MULTILINE))
    assert validate(schema, wrong).returncode == 1


def test_every_file_below_the_folder_of_the_forge_is_validated():
    files = {path for paths in SCHEMAS.values() for path in paths}
    assert {path for path in tracked(".github") if path.suffix == ".yml"} == files


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_ends_in_time_and_names_actions_by_version(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert "permissions" not in job
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))


def test_workflows_run_targets_and_install_extras_that_there_are():
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = set(re.findall(r"run: make ([\w-]+)", text))
    assert {"test", "check", "release-check", "docs"} <= run <= targets
    assert set(re.findall(r'-e "\.\[([\w-]+)\]"', text)) <= set(PROJECT["optional-dependencies"])


def test_the_client_is_tested_with_every_python_that_the_project_names():
    (workflow,) = [yaml.safe_load(path.read_text()) for path in WORKFLOWS]
    tested = workflow["jobs"]["python"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(named) <= set(tested)


def test_hooks_come_from_no_other_repository_and_with_the_versions_that_are_pinned():
    assert [each["repo"] for each in HOOKS] == ["local"]
    hooks = HOOKS[0]["hooks"]
    wanted = {name for hook in hooks for name in hook.get("additional_dependencies", ())}
    assert wanted and wanted <= set(PINNED)
    commands = {hook["entry"] for hook in hooks if hook["language"] == "system"}
    assert commands == {"make lint", "make types", "make imports"}


def test_a_report_of_a_defect_asks_what_doctor_says():
    form = yaml.safe_load((FORGE / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    required = {
        field["attributes"]["label"]
        for field in form["body"]
        if field.get("validations", {}).get("required")
    }
    assert "Output of `quire doctor`" in required
