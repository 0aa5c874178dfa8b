"""The verbs that need no queue: schema, local, and those that run a program of a checkout."""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from quire.cli.console import Console, add_json
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE

#: Where `quire local` keeps its data.
_DATA = Path("~/.local/share/quire/redis")


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


def add_local(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire local`."""
    parser.add_argument("--port", type=int, default=6379, help="where it listens [6379]")
    parser.add_argument(
        "--data", type=Path, default=_DATA, help=f"the folder of its append-only file [{_DATA}]"
    )


def run_local(arguments: argparse.Namespace, console: Console) -> int:
    """Replaces this process by a Redis for this machine, whose data outlives it."""
    from quire.transport.local_redis import INSTALL_HINT, SERVER_OPTIONS, server_program

    if (found := server_program()) is None:
        console.complain(f"no server is installed: {INSTALL_HINT}")
        return EXIT_ERROR
    kind, program = found
    folder = arguments.data.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Kept open by the server. Two servers that append to one file would mix their queues.
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The function takes no names.
        os.set_inheritable(lock, True)  # noqa: FBT003
    except BlockingIOError:
        console.complain(f"another server has its data in {folder}")
        return EXIT_ERROR
    except OSError as error:
        console.complain(f"{folder} cannot be used: {error.strerror}")
        return EXIT_ERROR
    options = [part.format(port=arguments.port, directory=folder) for part in SERVER_OPTIONS]
    console.note(
        f"{kind} at redis://127.0.0.1:{arguments.port}/0, data in {folder}; Ctrl-C ends it"
    )
    return _exec([program, *options, "--appendonly", "yes"])


def run_config(arguments: argparse.Namespace, console: Console) -> int:
    """Becomes `python -m service.worker.settings.show`, with the arguments after `show`."""
    if arguments.rest[:1] != ["show"]:
        console.complain("usage: quire config show [--origin] [--json] [flags of a worker]")
        return EXIT_USAGE
    rest = argparse.Namespace(rest=arguments.rest[1:])
    return _replace_process("service.worker.settings.show", rest, console)


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
