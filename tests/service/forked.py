"""Starts real workers from a server that has imported torch and transformers already.

Each worker is a process of its own, with its own threads, connections and model, and runs
`python -m service` from its first line. Only the imports are shared: in a fresh interpreter they
take several seconds of a core, most of a start.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection

#: What a worker with a model imports, and with it nearly all that takes time.
IMPORTS = (
    "service.worker.process.worker",
    "service.worker.model.text",
    "engine.model.load.load_runner",
    "transformers.models.llama.modeling_llama",
)
#: Torch reads it when it is imported, so the server needs it before its workers.
THREADS = {"OMP_NUM_THREADS": "1"}

_context = multiprocessing.get_context("forkserver")
#: The fork server that this module started, if any.
_server_pid: int | None = None


class ForkedProgram:
    """A module that runs as a program would: what `subprocess.Popen` has, with stderr piped."""

    def __init__(
        self, module: str, arguments: Sequence[str], *, environ: Mapping[str, str], folder: str
    ) -> None:
        _start_server()
        reader, writer = _context.Pipe(duplex=False)
        given = (module, tuple(arguments), dict(environ), folder, writer)
        self._process = _context.Process(target=_run, args=given, daemon=True)
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
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start_server() -> None:
    """Without effect once it runs.

    A process has one fork server. One that other tests have started lacks our imports, so it is
    replaced; the processes that it started continue.
    """
    global _server_pid
    server = forkserver._forkserver
    if server._forkserver_pid is not None and server._forkserver_pid != _server_pid:
        server._stop()
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(THREADS)
    try:
        _context.set_forkserver_preload(list(IMPORTS))
        forkserver.ensure_running()
        _server_pid = server._forkserver_pid
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
