"""Runs the programs of a release. A failing one ends the release, and its output is shown."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: The longest time of one program; the slowest installs packages.
COMMAND_SECONDS = 300.0


class Refused(Exception):
    """The built files cannot be released; the message says why."""


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """The standard output of a program; raises `Refused` if it fails or takes too long.

    PYTHONPATH is removed, so that the program cannot import a checkout instead of the package.
    """
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{shlex.join(command)}: took more than {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        raise Refused(f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
