"""`make release-check`: builds, checks and tries the files that are uploaded for a release.

Builds wheel and source archive, compares their contents with the checkout, installs each into an
empty environment and uses it there. As a control, a wheel without its Lua scripts must be refused.
At last it serves a model from the wheel (`ops.release.serving`). Needs the extra `release`, and a
package index for what the extra `worker` needs: more than a gigabyte.
"""

import argparse
import re
import shutil
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from ops.release.commands import Refused, run
from ops.release.serving import try_serving

ROOT = Path(__file__).resolve().parents[2]
#: Files of the source archive outside the package; hatchling adds PKG-INFO and .gitignore.
SDIST_FILES = {
    "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore",
}  # fmt: skip
#: The folders that are installed, and where a wheel has all but the first.
PACKAGES = ("quire", "engine", "service", "models")
RUNTIME = "quire/runtime"
#: This script runs in the new environment, with only the standard library and the package.
TRY = ROOT / "ops" / "release" / "try_installed.py"


def main() -> int:
    """Check a release; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--torch", default="torch", help="the requirement for torch [torch]")
    parser.add_argument("--torch-index-url", default="", help="a further index, for torch")
    flags = parser.parse_args()
    try:
        wheel = check(flags.folder)
        try_serving(wheel, torch=flags.torch, torch_index_url=flags.torch_index_url)
    except Refused as fault:
        sys.stderr.write(f"release-check: {fault}\n")
        return 1
    print(f"release-check: {wheel.name} can be released")
    return 0


def check(folder: Path) -> Path:
    """Empty `folder`, build into it, check the results. Returns the wheel.

    `Refused` at the first fault.
    """
    version = project()["version"]
    refuse(changelog_faults((ROOT / "CHANGELOG.md").read_text("utf-8"), version))
    shutil.rmtree(folder, ignore_errors=True)
    built = folder / "dist"
    # Without isolation, because the extra has hatchling with a pinned version.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(ROOT)])
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())])
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    refuse(wheel_faults(wheel))
    refuse(sdist_faults(sdist))
    control(wheel, folder)
    for archive in (wheel, sdist):
        try_archive(archive, folder / f"environment-{archive.suffix[1:]}", version)
    print(f"release-check: {wheel.name} and {sdist.name} are what the checkout has")
    return wheel


def project() -> dict:
    """The project table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def changelog_faults(text: str, version: str) -> list[str]:
    """What the changelog lacks for a version: its heading, or any line below it."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$"
    section = re.split(heading, text, maxsplit=1, flags=re.MULTILINE)
    if len(section) < 2:
        return [f"CHANGELOG.md has no heading `## [{version}] - DATE`"]
    own = section[1].split("\n## ", maxsplit=1)[0]
    return (
        [] if re.search(r"^- ", own, re.MULTILINE) else [f"CHANGELOG.md has nothing on {version}"]
    )


def package_files() -> set[str]:
    """The files of this checkout that are installed, as paths from its root."""
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    # Beside a compiled file, a Python that writes one has another for a moment.
    return {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"}


def in_wheel(name: str) -> str:
    """Where a wheel has a file of the checkout."""
    return name if name.startswith("quire/") else f"{RUNTIME}/{name}"


def wheel_faults(wheel: Path) -> list[str]:
    """Missing and unexpected files of a wheel, which has the package `quire` and its metadata."""
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    return _differences(names - metadata, set(map(in_wheel, package_files())), wheel.name)


def sdist_faults(sdist: Path) -> list[str]:
    """Missing and unexpected files of a source archive, which also has SDIST_FILES."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return _differences(names - SDIST_FILES, package_files(), sdist.name)


def _differences(found: set[str], wanted: set[str], archive: str) -> list[str]:
    assert any(name.endswith(".lua") for name in wanted)
    assert any(name.endswith("/py.typed") for name in wanted)
    missing = [f"{archive} lacks {name}" for name in sorted(wanted - found)]
    return missing + [f"{archive} has {name}, too" for name in sorted(found - wanted)]


def control(wheel: Path, folder: Path) -> None:
    """Check that the check can fail: the same wheel without its Lua scripts must be refused."""
    broken = folder / "control" / wheel.name
    broken.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as part:
        for name in whole.namelist():
            if not name.endswith(".lua"):
                part.writestr(name, whole.read(name))
    faults = wheel_faults(broken)
    if not faults or not all(fault.endswith(".lua") for fault in faults):
        raise Refused(f"the control, a wheel without its scripts, gave {faults}")
    print(f"release-check: the control was refused, as it {faults[0].partition(' ')[2]}, ...")


def try_archive(archive: Path, environment: Path, version: str) -> None:
    """Install an archive into an empty environment and use it there."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    run([*pip, str(archive)])
    scripts = sum(name.endswith(".lua") for name in package_files())
    # In an empty folder and without variables, so that the checkout cannot be imported instead.
    empty = environment / "empty"
    empty.mkdir()
    run([str(python), "-I", str(TRY), version, str(scripts)], cwd=empty)
    printed = run([str(environment / "bin" / "quire"), "--version"], cwd=empty)
    if printed.strip() != f"quire {version}":
        raise Refused(f"`quire --version` of {archive.name} prints {printed!r}")
    if "submit" not in run([str(environment / "bin" / "quire"), "--help"], cwd=empty):
        raise Refused(f"`quire --help` of {archive.name} names no verbs")
    print(f"release-check: {archive.name} is installed and works")


def refuse(faults: Iterable[str]) -> None:
    """Raise `Refused` with all faults, if there are any."""
    if text := "\n  ".join(faults):
        raise Refused(text)


if __name__ == "__main__":
    sys.exit(main())
