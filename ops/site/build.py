"""Builds the documentation site: `make docs`, into build/docs/site.

The pages keep their folders, so that a link works on the forge and on the site alike. A broken
link or anchor and a page that is not in the navigation fail the build. A second build with one
mistake of each kind, the control, shows that they do.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "build" / "docs" / "source"
#: The pages of the site, as patterns beneath the checkout.
PAGES = ("*.md", "docs/**/*.md", "benchmarks/results/*.md", "models/*/README.md")
#: A link to a comparison or a release on the forge, which is no file.
FORGE = re.compile(r"^\[[^\]]+\]: \.\./\.\./.*\n", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")

#: What the control adds to the pages, and what the build has to say about each.
MISTAKES: Mapping[str, tuple[str, str]] = {
    "SECURITY.md": ("\n[a](no-such-page.md)\n", "no-such-page.md"),
    "CONTRIBUTING.md": ("\n[a](README.md#no-such-heading)\n", "no-such-heading"),
    "docs/unlisted.md": ("# Unlisted\n", "unlisted.md"),
}


def pages(root: Path) -> list[Path]:
    """All pages, relative to the checkout."""
    found = {path for pattern in PAGES for path in root.glob(pattern)}
    return sorted(path.relative_to(root) for path in found)


def linked_files(page: Path, root: Path) -> Iterable[Path]:
    """The files other than pages that a page links to, relative to the checkout."""
    for link in LINK.findall((root / page).read_text("utf-8")):
        target = (root / page.parent / link).resolve()
        if "://" not in link and target.suffix != ".md" and target.is_file():
            yield target.relative_to(root)


def stage(root: Path, source: Path) -> None:
    """Copies the pages, and the files that they link to, into an empty folder."""
    shutil.rmtree(source, ignore_errors=True)
    own = pages(root)
    files = {target for page in own for target in linked_files(page, root)}
    for path in (*own, *files):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        if path in own:
            text = (root / path).read_text("utf-8")
            (source / path).write_text(FORGE.sub("", text), "utf-8")
        else:
            shutil.copyfile(root / path, source / path)


def build() -> subprocess.CompletedProcess[str]:
    """Runs mkdocs on what is staged; returns its exit code and messages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    # The theme would advertise another generator in every build.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )


def control() -> list[str]:
    """Builds with the mistakes; returns those that the build accepted."""
    for page, (text, _) in MISTAKES.items():
        with (SOURCE / page).open("a", encoding="utf-8") as file:
            file.write(text)
    done = build()
    messages = done.stdout + done.stderr
    unseen = [page for page, (_, name) in MISTAKES.items() if name not in messages]
    return unseen if done.returncode else list(MISTAKES)


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.site.build", description=__doc__)
    parser.parse_args()
    stage(ROOT, SOURCE)
    if unseen := control():
        sys.stderr.write(f"the build accepted the mistakes in {', '.join(unseen)}\n")
        return 1
    stage(ROOT, SOURCE)
    done = build()
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        return 1
    count = len(pages(ROOT))
    sys.stdout.write(f"{count} pages in build/docs/site; the control's 3 mistakes were refused\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
