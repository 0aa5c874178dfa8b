"""With which flags and environment `quire serve` starts each program, and where it listens."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from quire.cli.local import server_command
from quire.cli.programs import environment_of_programs
from quire.cli.serve.child import Program
from quire.cli.serve.model import Model
from quire.cli.sources import program_setting
from quire.errors import InvalidRequest, QuireError
from quire.transport.local_redis import free_port
from quire.version import install_hint

#: The program of a worker; tests have one without a model.
WORKER = "service"
#: Modules of which each is missing where only a part of Quire is installed.
_NEEDED = ("torch", "transformers", "structlog", "starlette", "uvicorn", "prometheus_client")
#: What the command itself says to its programs, so no variable of theirs may say another thing.
_OWN_SETTINGS = ("REDIS_URL", "REDIS_PASSWORD", "QUEUE", "QUEUES", "SHARDS")
_PREFIXES = ("QUIRE_", "QUIRE_GATEWAY_", "QUIRE_CONSOLE_")


class ExtraMissing(QuireError):
    """A package is missing; the message says how to install it."""


def require_libraries() -> None:
    """ExtraMissing unless all programs can be started; imports none of their packages."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = install_hint("worker")
        raise ExtraMissing(f"the module {missing[0]} is missing; `quire serve` needs {hint}")


def port_of(
    flag: str, wanted: int | None, usual: int, host: str, tell: Callable[[str], None]
) -> int:
    """The port that was asked for, else the usual one, else a free one.

    InvalidRequest, with the flag, if the one that was asked for cannot be had.
    """
    if wanted is not None:
        if wanted and (trouble := _trouble(host, wanted)):
            reason = f"cannot listen on {host}:{wanted}: {trouble}; 0 takes a free port"
            raise InvalidRequest(flag, reason)
        return wanted or free_port()
    if _trouble(host, usual) is None:
        return usual
    port = free_port()
    tell(f"port {usual} is taken, so {port} is used; {flag} chooses another one")
    return port


def _trouble(host: str, port: int) -> str | None:
    """Why a server cannot listen there; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a connection that was closed a moment ago is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return None


def own_server(port: int, folder: Path, lock: int) -> tuple[str, Program]:
    """The kind of this machine's server for Redis, and how it is started. NoServer.

    The server keeps the lock of the folder, also where the command is killed.
    """
    kind, command = server_command(port, folder)
    # A server that is asked to end writes what it has; one that is killed may lose a second of it.
    program = Program("redis", "redis", command, at_orphanage=signal.SIGTERM, kept_open=(lock,))
    return kind, program


def shared_environment(url: str, *, queue: str, shards: int, num_workers: int) -> dict[str, str]:
    """The environment of all programs of Quire. The url, with its password, is in no flag."""
    own = {f"{prefix}{name}{end}" for prefix in _PREFIXES for name in _OWN_SETTINGS
           for end in ("", "_FILE")}  # fmt: skip
    environ = {k: v for k, v in environment_of_programs(os.environ).items() if k not in own}
    environ |= {"QUIRE_REDIS_URL": url, "QUIRE_QUEUE": queue, "QUIRE_SHARDS": str(shards)}
    if num_workers > 1 and "OMP_NUM_THREADS" not in environ:
        # Otherwise each would use all cores until it notices the others.
        cores = len(os.sched_getaffinity(0))
        environ["OMP_NUM_THREADS"] = str(max(1, cores // num_workers))
    return environ


def worker(number: int, model: Model, *, num_workers: int = 1) -> Program:
    """How a worker is started. Its port is a free one: there may be several."""
    flags = ["--model", model.source, "--http-port", "0"]
    if num_workers > 1 and (own := program_setting(os.environ, "worker_name")):
        # Each needs another one, so that `quire drain` and the registry can tell them apart.
        flags += ["--worker-name", f"{own}-{number}"]
    if model.name is not None and program_setting(os.environ, "served_model_name") is None:
        flags += ["--served-model-name", model.name]
    return _program("worker", f"worker-{number}", WORKER, *flags)


def gateway(host: str, port: int) -> Program:
    """How the gateway is started."""
    where = ("--http-host", host, "--http-port", str(port))
    return _program("gateway", "gateway", "service.gateway", *where)


def console(host: str, port: int) -> Program:
    """How the console is started."""
    where = ("--http-host", host, "--http-port", str(port))
    return _program("console", "console", "service.console", *where)


def _program(kind: str, name: str, module: str, *flags: str) -> Program:
    # The command reads their events, also if variables ask for another format or for less.
    debugs = program_setting(os.environ, "log_level") == "debug"
    log = ("--log-format", "json", "--log-level", "debug" if debugs else "info")
    return Program(name, kind, [sys.executable, "-m", module, *flags, *log])
