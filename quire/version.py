"""The version of this code, whose one source is `[project]` in pyproject.toml, and its extras."""

from __future__ import annotations

from functools import cache
from pathlib import Path

#: What package indexes call the project; `quire` there belongs to somebody else.
DISTRIBUTION = "quire-inference"
#: The version if the code was copied without pyproject.toml and without the metadata of an install.
UNKNOWN_VERSION = "unknown"


@cache
def quire_version() -> str:
    """The version of the code that runs; "unknown" if nothing tells it.

    A checkout and the image have pyproject.toml beside the package. It is read first, because the
    metadata of an editable install keeps the version of the day of the installation.
    """
    return _beside(Path(__file__).resolve().parents[1]) or _installed() or UNKNOWN_VERSION


def install_hint(extra: str) -> str:
    """How to install an extra: a part of a sentence that says what needs it."""
    return (
        f"the extra `{extra}`: pip install -c constraints.txt -e '.[{extra}]' in a checkout, or "
        f"pip install 'FILE.whl[{extra}]' with a wheel"
    )


def _beside(folder: Path) -> str | None:
    """The version in a folder's pyproject.toml, if the file is ours."""
    import tomllib

    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    return str(project["version"]) if project.get("name") == DISTRIBUTION else None


def _installed() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None
