"""The verbs that need no queue: schema and local."""

from __future__ import annotations

import argparse
import fcntl
import os
from pathlib import Path

from quire.cli.console import Console, add_json
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK
from quire.cli.programs import become

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
    return become([program, *options, "--appendonly", "yes"])
