"""`make up` says what the machine lacks, before docker prints its usage."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.checkout import COMPOSE_FILE, ROOT

SCRIPT = ROOT / "ops" / "check-docker.sh"

#: A docker that answers the two questions of the script, or fails at one of them.
DOCKER = """#!/bin/sh
case "$1 $2" in
    "compose version") {compose} ;;
    "version --format") {engine} ;;
    *) echo "Usage:  docker [OPTIONS] COMMAND" >&2; exit 125 ;;
esac
"""


def check(folder: Path, docker: str | None) -> subprocess.CompletedProcess[str]:
    """Run the script where `docker` is the only docker there is."""
    for tool in ("sh", "sort", "head"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    if docker is not None:
        (folder / "docker").write_text(docker)
        (folder / "docker").chmod(0o755)
    return subprocess.run(
        ["sh", str(SCRIPT)], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=30
    )


def versions(compose: str, engine: str) -> str:
    return DOCKER.format(compose=f"echo {compose}", engine=f"echo {engine}")


@pytest.mark.parametrize(
    ("compose", "engine"),
    [
        ("2.20.2", "25.0.0"),
        ("v2.26.1-desktop.1", "25.0.3"),
        ("2.100.0", "28.1.1+1"),
        ("5.0.1", "29"),
    ],
)
def test_a_docker_that_is_new_enough_passes_without_a_word(tmp_path, compose, engine):
    done = check(tmp_path, versions(compose, engine))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("docker", "told"),
    [
        (None, "docker is missing: install Docker Engine 25 or later"),
        (DOCKER.format(compose="exit 1", engine="echo 27.0.0"), "has no compose plugin"),
        (versions("2.9.0", "27.0.0"), "docker compose is 2.9.0, and 2.20.2 or later is needed"),
        (versions("2.26.1", "24.0.7"), "the docker engine is 24.0.7, and 25 or later is needed"),
        (versions("2.26.1", "9.1.1"), "the docker engine is 9.1.1, and 25 or later is needed"),
        (DOCKER.format(compose="echo 2.26.1", engine="exit 1"), "does not answer"),
    ],
)
def test_what_is_missing_is_told_in_one_line(tmp_path, docker, told):
    done = check(tmp_path, docker)
    assert done.returncode == 1
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["up", "down"])
def test_make_checks_before_it_calls_docker(target):
    # `make test` hands its own flags on to a make that it starts.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "--dry-run", target],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    commands = done.stdout.splitlines()
    assert commands[0] == "sh ops/check-docker.sh"
    assert "docker compose" in commands[-1]


def test_the_versions_asked_for_are_those_of_what_the_file_uses():
    """`start_interval` came with engine 25; without it the check would be too strict."""
    assert "start_interval:" in COMPOSE_FILE.read_text()
    assert "MIN_ENGINE=25\n" in SCRIPT.read_text()
    assert "Docker Engine 25 or" in (ROOT / "docs/how-to/worker.md").read_text()
