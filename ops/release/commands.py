"""Runs the programs of a release; one that fails ends it, with what it printed."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: Longest time of one program. The slowest one installs packages.
COMMAND_SECONDS = 300.0


class Refused(Exception):
    """What was built cannot be released; the text says why."""


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """The standard output of a program; raises `Refused` if it fails or takes too long.

    It does not see PYTHONPATH, which could let a checkout stand in for what was installed.
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
