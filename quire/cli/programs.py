"""The programs of the application, and how a command becomes one: worker, gateway and the others.

They are the packages `service` and `engine`. In a checkout and in the image these are beside the
package `quire`. A wheel has them inside it, in a folder that only the programs get on their path:
their plain names would hide those of someone else's packages.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from quire.cli.console import Console
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from quire.cli.usage import COMMAND_VARIABLE

_PACKAGE = Path(__file__).resolve().parents[1]
#: Where a wheel has the application; see pyproject.toml.
_INSIDE = _PACKAGE / "runtime"

#: The folder with the packages of the application.
APPLICATION = _INSIDE if _INSIDE.is_dir() else _PACKAGE.parent
#: The model of a worker that names none.
EMBEDDED_MODEL = APPLICATION / "models" / "abacus"
#: Where a gateway and a console listen; the ports before are those of the worker and the others.
GATEWAY_PORT = 10_402
CONSOLE_PORT = 10_405


def environment_of_programs(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program and of the processes that it starts.

    PYTHONSAFEPATH: otherwise `python -m service` would run a package `service` in the working
    folder.
    """
    path = filter(None, [str(APPLICATION), environ.get("PYTHONPATH")])
    return {**environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def run_config(arguments: argparse.Namespace, console: Console) -> int:
    """Becomes `python -m service.worker.settings.show`, with the arguments after `show`."""
    if arguments.rest[:1] != ["show"]:
        usage = "usage: quire config show [--origin] [--json] [flags of a worker]"
        if arguments.rest[:1] in (["--help"], ["-h"]):
            console.data(None, usage)
            return EXIT_OK
        console.complain(usage)
        return EXIT_USAGE
    return _become("config show", "service.worker.settings.show", arguments.rest[1:])


def run_worker(arguments: argparse.Namespace, _: Console) -> int:
    """Becomes `python -m service`."""
    return _become("worker", "service", arguments.rest)


def run_gateway(arguments: argparse.Namespace, _: Console) -> int:
    """Becomes `python -m service.gateway`."""
    return _become("gateway", "service.gateway", arguments.rest)


def run_batcher(arguments: argparse.Namespace, _: Console) -> int:
    """Becomes `python -m service.batcher`."""
    return _become("batcher", "service.batcher", arguments.rest)


def run_notifier(arguments: argparse.Namespace, _: Console) -> int:
    """Becomes `python -m service.notifier`."""
    return _become("notifier", "service.notifier", arguments.rest)


def run_exporter(arguments: argparse.Namespace, _: Console) -> int:
    """Becomes `python -m service.exporter`."""
    return _become("exporter", "service.exporter", arguments.rest)


def run_console(arguments: argparse.Namespace, _: Console) -> int:
    """Becomes `python -m service.console`."""
    return _become("console", "service.console", arguments.rest)


def run_demo(arguments: argparse.Namespace, console: Console) -> int:
    """Becomes `python -m examples.demo`, which only a checkout has."""
    if not (APPLICATION / "examples" / "demo").is_dir():
        console.complain("the demo is in a checkout of Quire: run `make demo` there")
        return EXIT_ERROR
    return _become("demo", "examples.demo", arguments.rest)


def become(command: list[str], environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Replaces this process, so that signals and the exit code are those of the program."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environ)  # noqa: S606


def _become(verb: str, module: str, arguments: list[str]) -> NoReturn:
    environ = {**environment_of_programs(os.environ), COMMAND_VARIABLE: f"quire {verb}"}
    become([sys.executable, "-m", module, *arguments], environ)
