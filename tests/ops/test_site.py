"""The documentation site: what is staged and navigated, and the picture of the README."""

import json
import subprocess

import pytest
import yaml

from ops.site import build, picture
from tests.ops.checkout import ROOT


def navigation() -> list[str]:
    """The pages that mkdocs.yml names, in their order."""
    section = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    found: list[str] = []

    def collect(node: object) -> None:
        if isinstance(node, str):
            found.append(node)
        elif isinstance(node, dict):
            collect(list(node.values()))
        elif isinstance(node, list):
            for member in node:
                collect(member)

    collect(yaml.safe_load(section))
    return found


def test_the_navigation_has_every_page_once():
    assert sorted(navigation()) == [str(page) for page in build.pages(ROOT)]


def test_what_a_page_links_to_is_staged_with_it_and_links_of_the_forge_are_not(tmp_path):
    root, source = tmp_path / "root", tmp_path / "source"
    (root / "docs").mkdir(parents=True)
    (root / "code.py").touch()
    (root / "other.py").touch()
    (root / "docs" / "page.md").write_text("[code](../code.py#L1)\n[1]: ../../compare/a...b\nend\n")
    build.stage(root, source)
    staged = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert staged == {"code.py", "docs/page.md"}
    assert (source / "docs" / "page.md").read_text() == "[code](../code.py#L1)\nend\n"


def test_a_mistake_that_the_build_accepts_is_named(tmp_path, monkeypatch):
    build.stage(ROOT, tmp_path)
    monkeypatch.setattr(build, "SOURCE", tmp_path)

    def says(code: int, messages: str) -> list[str]:
        done = subprocess.CompletedProcess([], code, messages, "")
        monkeypatch.setattr(build, "build", lambda: done)
        return build.control()

    names = [name for _, name in build.MISTAKES.values()]
    assert says(1, " ".join(names)) == []
    assert says(1, " ".join(names[1:])) == ["SECURITY.md"]
    assert says(0, " ".join(names)) == list(build.MISTAKES)


def test_the_picture_is_drawn_from_the_recording():
    run = picture.read(json.loads(picture.RECORDING.read_text()))
    assert picture.PICTURE.read_text() == picture.draw(run), "run: python -m ops.site.picture"
    assert 0 < run.killed_at < run.resumed_at < run.ended_at
    assert run.killed != run.survivor
    assert run.figures["lost_tokens"] == run.figures["repeated_tokens"] == 0
    assert [n for _, n in run.tokens] == sorted(n for _, n in run.tokens)


def test_a_recording_without_a_takeover_is_refused():
    recording = json.loads(picture.RECORDING.read_text())
    recording["lines"] = [one for one in recording["lines"] if "goes on" not in one[1]]
    with pytest.raises(ValueError, match="no resume"):
        picture.read(recording)
