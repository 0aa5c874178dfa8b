"""The verbs that need no queue: schema, and those that run a program of a checkout."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from quire.cli.console import Console, add_json
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire schema`."""
    parser.add_argument(
        "what", nargs="?", choices=["request", "sampling"], default="request", help="[request]"
    )
    add_json(parser)


def run_schema(arguments: argparse.Namespace, console: Console) -> int:
    """Prints a JSON schema."""
    from quire.wire.protocol import GenerationRequest
    from quire.wire.sampling import SamplingParams

    model = GenerationRequest if arguments.what == "request" else SamplingParams
    console.data(model.model_json_schema())
    return EXIT_OK


def run_config(arguments: argparse.Namespace, console: Console) -> int:
    """Becomes `python -m service.settings.show`, with the arguments after `show`."""
    if arguments.rest[:1] != ["show"]:
        console.complain("usage: quire config show [--origin] [--json] [flags of a worker]")
        return EXIT_USAGE
    rest = argparse.Namespace(rest=arguments.rest[1:])
    return _replace_process("service.settings.show", rest, console)


def run_worker(arguments: argparse.Namespace, console: Console) -> int:
    """Replaces this process by `python -m service`, with all arguments."""
    return _replace_process("service", arguments, console)


def run_gateway(arguments: argparse.Namespace, console: Console) -> int:
    """Replaces this process by `python -m service.gateway`, with all arguments."""
    return _replace_process("service.gateway", arguments, console)


def run_console(arguments: argparse.Namespace, console: Console) -> int:
    """Replaces this process by `python -m service.console`, with all arguments."""
    return _replace_process("service.console", arguments, console)


def run_demo(arguments: argparse.Namespace, console: Console) -> int:
    """Replaces this process by `python -m examples.demo`."""
    return _replace_process("examples.demo", arguments, console)


def _replace_process(module: str, arguments: argparse.Namespace, console: Console) -> int:
    package = module.partition(".")[0]
    # An installed `quire` is not part of a checkout, but may be run inside one.
    sys.path.insert(0, str(Path.cwd()))
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or not _is_ours(Path(found.origin)):
        console.complain(
            f"`{package}` cannot be imported here: run workers, gateways, consoles and the demo "
            "from a checkout of Quire (pip install -c constraints.txt -e '.[worker]', '.[gateway]' "
            "or '.[console]') or from its image, not from the installed client"
        )
        return EXIT_ERROR
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(found.origin).parents[1]), os.environ.get("PYTHONPATH")])
    )
    return _exec([sys.executable, "-m", module, *arguments.rest])


def _is_ours(init: Path) -> bool:
    """Whether this package is part of a checkout of Quire, and not another one of this name."""
    return (init.parents[1] / "quire" / "wire" / "protocol.py").exists()


def _exec(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # exec, and not a child process, so that signals and the exit code are the program's own.
    os.execv(command[0], command)  # noqa: S606
