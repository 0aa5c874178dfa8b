"""The verbs that need no queue: schema and local."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
from pathlib import Path

from quire.cli.console import Console, add_json
from quire.cli.exit_codes import EXIT_OK
from quire.cli.programs import become
from quire.errors import QuireError

#: The port of Redis that clients use unless they are told another one.
REDIS_PORT = 6379
#: Where `quire local` and `quire serve` keep the data of their server.
DATA = Path("~/.local/share/quire/redis")
#: Who has the lock of a folder of data.
FOLDER_TAKEN = "`quire serve` or `quire local` already runs with the data"


class FolderUnusable(QuireError):
    """The folder cannot have the data of a server; the message says why."""


class NoServer(QuireError):
    """This machine has no program that is a server for Redis; the message says what to install."""


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
    parser.add_argument(
        "--port", type=int, default=REDIS_PORT, help=f"where it listens [{REDIS_PORT}]"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help=f"the folder of its append-only file [{DATA}]"
    )


def run_local(arguments: argparse.Namespace, console: Console) -> int:
    """Replaces this process by a Redis for this machine, whose data outlives it."""
    folder = arguments.data.expanduser()
    kind, command = server_command(arguments.port, folder)
    # The server inherits it. The function takes no names.
    os.set_inheritable(lock_of(folder), True)  # noqa: FBT003
    console.tell(
        f"{kind} at redis://127.0.0.1:{arguments.port}/0, data in {folder}; Ctrl-C ends it"
    )
    # Its log follows, and with all that it says of itself would hide the line.
    return become([*command, "--loglevel", "warning"])


def server_command(port: int, folder: Path) -> tuple[str, list[str]]:
    """The kind of the best server on this machine, and its command line. NoServer."""
    from quire.transport.local_redis import INSTALL_HINT, SERVER_OPTIONS, server_program

    if (found := server_program()) is None:
        raise NoServer(f"no server for Redis is installed: {INSTALL_HINT}")
    kind, program = found
    options = [part.format(port=port, directory=folder) for part in SERVER_OPTIONS]
    return kind, [program, *options, "--appendonly", "yes"]


def make_private(folder: Path) -> None:
    """Makes a folder, and the one that it is in, so that no other user can read them. OSError.

    A folder that exists may have other uses and keeps its mode, but for the default one, which
    earlier versions have made.
    """
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if each == DATA.expanduser():
            with contextlib.suppress(PermissionError):
                each.chmod(0o700)


def lock_of(
    folder: Path,
    *,
    holder: str = FOLDER_TAKEN,
    advice: str = "use that one, or another folder (--data)",
) -> int:
    """A file descriptor that has the lock of a folder, which it makes. FolderUnusable.

    Who uses the folder must keep it open: two servers that append to one file would mix their
    queues. `holder`, `advice`: what a person is told of another one that has the lock.
    """
    try:
        make_private(folder)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderUnusable(f"{holder} in {folder}: {advice}") from None
    except OSError as error:
        raise FolderUnusable(f"{folder} cannot be used: {error.strerror}") from error
    return lock
