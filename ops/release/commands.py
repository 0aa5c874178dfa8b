"""Runs the programs of a release. A failing one ends the release, and its output is shown."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: The longest time of one program, unless it is said; the slowest installs packages.
COMMAND_SECONDS = 300.0


class Refused(Exception):
    """The built files cannot be released; the message says why."""


def bare_variables() -> dict[str, str]:
    """The environment without PYTHONPATH: no program may import a checkout instead of a package."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def run(
    command: Sequence[str], *, cwd: Path | None = None, seconds: float = COMMAND_SECONDS
) -> str:
    """The standard output of a program; raises `Refused` if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=bare_variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{shlex.join(command)}: took more than {seconds:.0f} s") from None
    if done.returncode:
        raise Refused(f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
