"""Starts programs of ours from a server that has their imports already.

Each is a process of its own, with its own threads, connections and model, and runs from its first
line as with `python -m`. Only the imports are shared: in a fresh interpreter they take a second of
a core, and several with a model, most of a start.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from unittest import mock

#: What the processes of the service import, and the fake workers of tests.
SERVICE = (
    "tests.service.builders",
    "service.gateway.server",
    "service.batcher.batcher",
    "service.notifier.notifier",
    "service.console.server",
)
#: What a worker with a model imports, and with it nearly all that takes time.
MODEL = (
    "service.worker.process.worker",
    "service.worker.model.text",
    "engine.model.load.load_runner",
    "transformers.models.llama.modeling_llama",
)
#: Torch reads it when it is imported, so the server needs it before its workers.
THREADS = {"OMP_NUM_THREADS": "1"}

_context = multiprocessing.get_context("forkserver")


class ForkedProgram:
    """A module that runs as a program would: what `subprocess.Popen` has, with stderr piped."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: str,
        imports: tuple[str, ...] = MODEL,
    ) -> None:
        server = _server_with(imports)
        reader, writer = _context.Pipe(duplex=False)
        given = (module, tuple(arguments), dict(environ), folder, writer)
        self._process = _context.Process(target=_run, args=given, daemon=True)
        # A process knows one server, which other tests may have started without these imports.
        with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            self._process.start()
        writer.close()
        self.stderr = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        # Its server collects it a moment before it tells how it ended.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server_with(imports: tuple[str, ...]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(imports))
    with mock.patch.dict(os.environ, THREADS):
        server.ensure_running()
    return server


def _run(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    stderr: Connection,
) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
