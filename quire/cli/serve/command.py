"""The verb serve: its flags, and the order of a run: Redis, all others, the drain."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.cli.console import Console, add_server, sides_of, url_of
from quire.cli.exit_codes import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from quire.cli.local import DATA, FOLDER_TAKEN, REDIS_PORT, lock_of
from quire.cli.programs import CONSOLE_PORT, GATEWAY_PORT
from quire.cli.serve import plan
from quire.cli.serve.child import Child, Program
from quire.cli.serve.model import Model, find_model
from quire.cli.serve.output import lasting_output
from quire.cli.serve.screen import PROGRESS_SECONDS, Screen
from quire.cli.serve.supervisor import ProgramFailed, Supervisor
from quire.cli.sources import known_settings, program_setting, values_of_variables, without_password
from quire.cli.usage import positive
from quire.errors import InvalidRequest, QuireError
from quire.queue.roles import Observer
from quire.transport.connection import connect
from quire.transport.local_redis import trouble_of

#: The order of the end: no new work, then the work, then what keeps it.
_END = (("gateway", "console"), ("worker",), ("redis",))
#: The pause between two checks whether the server for Redis is ready.
_POLL_SECONDS = 0.05
_LOCAL_HOST = "127.0.0.1"
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class _Server:
    """The server for Redis: its url, whose it is, and how it is started if it is our own."""

    url: str
    whose: str
    program: Program | None


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire serve`. InvalidRequest for an invalid file of settings."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, a Hugging Face name, or smollm2, which is fetched "
        "[QUIRE_MODEL or abacus, which Quire brings]",
    )
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="[1]")
    parser.add_argument(
        "--host", help="where the OpenAI API listens [QUIRE_GATEWAY_HTTP_HOST or 127.0.0.1]"
    )
    ports = (
        ("--port", f"of the OpenAI API [QUIRE_GATEWAY_HTTP_PORT or {GATEWAY_PORT}"),
        ("--console-port", f"of the console [QUIRE_CONSOLE_HTTP_PORT or {CONSOLE_PORT}"),
        ("--redis-port", f"of the server for Redis that is started [{REDIS_PORT}"),
    )
    for flag, what in ports:
        help_ = f"port {what}, or a free one if it is taken]; 0 takes a free one"
        parser.add_argument(flag, type=_port, metavar="PORT", help=help_)
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help=f"the folder of logs and of the data of a server that is started [{DATA}]",
    )
    parser.add_argument("--verbose", action="store_true", help="print the logs of all programs")
    add_server(parser)
    # Without a url, a server is started.
    parser.set_defaults(redis_url=known_settings(os.environ).get("redis_url"))


def run_serve(arguments: argparse.Namespace, console: Console) -> int:
    """Starts all programs, and keeps them running until a signal comes."""
    plan.require_libraries()
    model = find_model(arguments.model, console.tell)
    folder = _folder_of(arguments)
    # Before anything is said of ports: without its folder the command starts nothing.
    with _owned(folder, with_data=arguments.redis_url is None) as lock:
        return _run(arguments, console, model, folder, lock)


def _run(
    arguments: argparse.Namespace, console: Console, model: Model, folder: Path, lock: int | None
) -> int:
    others = _gateway_and_console(arguments, console)
    server = _server_of(arguments, console, folder, lock)
    logs = folder / "logs"
    screen = Screen(
        console,
        model,
        redis=f"{without_password(server.url)}  ({server.whose})",
        redis_url=without_password(server.url),
        logs=logs,
        num_workers=arguments.workers,
        needs_key=program_setting(os.environ, "keys_file", program="gateway") is not None,
        is_verbose=arguments.verbose,
    )
    environ = plan.shared_environment(
        server.url,
        queue=arguments.queue,
        shards=int(arguments.shards),
        num_workers=arguments.workers,
    )
    workers = [
        plan.worker(number + 1, model, num_workers=arguments.workers)
        for number in range(arguments.workers)
    ]
    programs = [each.with_environment(environ) for each in [*others, *workers]]
    waiting = partial(_tell_of_waiting, server.url, arguments, screen)
    return _serve(server, programs, logs, screen, console, waiting)


def _gateway_and_console(arguments: argparse.Namespace, console: Console) -> list[Program]:
    """How they are started, on ports that are free now. InvalidRequest."""
    host = arguments.host or program_setting(os.environ, "http_host", program="gateway")
    host = host or _LOCAL_HOST
    wanted = _port_asked_for(arguments.port, "gateway")
    port = plan.port_of("--port", wanted, GATEWAY_PORT, host, console.tell)
    gateway = plan.gateway(host, port)
    wanted = _port_asked_for(arguments.console_port, "console")
    port = plan.port_of("--console-port", wanted, CONSOLE_PORT, _LOCAL_HOST, console.tell)
    return [gateway, plan.console(_LOCAL_HOST, port)]


def _serve(
    server: _Server,
    programs: list[Program],
    logs: Path,
    screen: Screen,
    console: Console,
    tell_of_waiting: Callable[[], None],
) -> int:
    began = time.monotonic()
    supervised = Supervisor(logs, tell=screen.tell, hear=screen.hear, show=screen.show)
    with lasting_output(), supervised as supervisor:
        try:
            if server.program is not None:
                child = supervisor.start(server.program)
                _wait_for_server(supervisor, server.url, child)
            if not supervisor.num_stops:
                tell_of_waiting()
                for program in programs:
                    supervisor.start(program)
            _keep(supervisor, screen)
            screen.stopping(time.monotonic() - began)
            is_drained = supervisor.drain(_END)
        except ProgramFailed as failed:
            console.complain(failed)
            return failed.exit_code
        screen.stopped(is_drained=is_drained)
        if supervisor.num_stops > 1:
            return EXIT_INTERRUPTED
        return EXIT_OK if is_drained else EXIT_ERROR


def _keep(supervisor: Supervisor, screen: Screen) -> None:
    """Returns at a signal. Others may use Redis and the gateway, also after the last worker."""
    while not supervisor.num_stops:
        if supervisor.keeps("worker"):
            screen.waiting(supervisor.running("worker"))
        else:
            screen.without_workers()
        supervisor.turn(PROGRESS_SECONDS)


def _tell_of_waiting(url: str, arguments: argparse.Namespace, screen: Screen) -> None:
    """Says how many requests wait already: perhaps they were sent for another model."""
    own = {**vars(arguments), "redis_url": url, "redis_password": None}
    # A user that may not look can serve all the same.
    with contextlib.suppress(QuireError):
        sides = sides_of(Observer, argparse.Namespace(**own), retry_seconds=0.0)
        screen.queued(sum(sum(side.queue_depth().values()) for side in sides), arguments.queue)


@contextlib.contextmanager
def _owned(folder: Path, *, with_data: bool) -> Iterator[int | None]:
    """Inside this context no other command has the logs in a folder, nor the data, if asked for.

    Gives the lock of the data, which the server inherits. That of the logs is another one, because
    with --redis-url the server in that folder is another one's. FolderUnusable.
    """
    advice = (
        f"name another folder with --data, and to use the server there also --redis-url "
        f"redis://{_LOCAL_HOST}:{REDIS_PORT}/0"
    )
    with contextlib.ExitStack() as locks:
        data = None
        if with_data:
            data = lock_of(folder, holder=FOLDER_TAKEN, advice=advice)
            locks.callback(os.close, data)
        # Two commands would rename each other's logs.
        holder = "another `quire serve` has its logs"
        locks.callback(os.close, lock_of(folder / "logs", holder=holder))
        yield data


def _wait_for_server(supervisor: Supervisor, url: str, child: Child) -> None:
    """Returns when the server answers, or at a signal. One with much data takes a while."""
    with connect(url, block_seconds=0.0) as connection:
        while not supervisor.num_stops and trouble_of(connection, child.process_id) is not None:
            supervisor.turn(_POLL_SECONDS)


def _server_of(
    arguments: argparse.Namespace, console: Console, folder: Path, lock: int | None
) -> _Server:
    """The server that flag, variable or file name, once it answers; else one to start.

    `lock`: that of the data in the folder, if one is to start.
    """
    if lock is not None:
        wanted, usual = arguments.redis_port, REDIS_PORT
        port = plan.port_of("--redis-port", wanted, usual, _LOCAL_HOST, console.tell)
        if wanted is None and port != usual:
            console.tell(f"to use the server there: --redis-url redis://{_LOCAL_HOST}:{usual}/0")
        kind, program = plan.own_server(port, folder, lock)
        return _Server(f"redis://{_LOCAL_HOST}:{port}/0", f"{kind}, data in {folder}", program)
    source = _source_of(arguments.redis_url)
    if arguments.redis_port is not None:
        raise InvalidRequest("--redis-port", f"no server is started, because {source} names one")
    url = url_of(arguments)
    try:
        connection = connect(url, block_seconds=0.0)
    except ValueError as error:
        raise InvalidRequest("redis-url", str(error)) from error
    with connection:
        connection.ping()
    return _Server(url, f"of {source}; it goes on when this ends", None)


def _folder_of(arguments: argparse.Namespace) -> Path:
    """The folder of data, as a person can find it from anywhere."""
    folder: Path = arguments.data.expanduser().absolute()
    return folder


def _source_of(url: str) -> str:
    """What has named the url."""
    if values_of_variables(os.environ, ("redis_url",)).get("redis_url") == url:
        return "QUIRE_REDIS_URL"
    is_in_file = known_settings(os.environ).get("redis_url") == url
    return "the file of settings" if is_in_file else "--redis-url"


def _port_asked_for(flag: int | None, program: str) -> int | None:
    """The port of a flag, or of a program's own settings. InvalidRequest."""
    text = program_setting(os.environ, "http_port", program=program)
    if flag is not None or text is None:
        return flag
    try:
        return _port(text)
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"http_port of the {program}", str(error)) from error


def _port(text: str) -> int:
    """The type of a flag that is a port. argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)
