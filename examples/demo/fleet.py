"""The demo's workers: real `python -m service` processes, one of which will be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from quire import Broker

#: A worker imports torch and loads the model before it signs the registry.
READY_SECONDS = 180.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
LOG_TAIL_CHARACTERS = 2000

#: Short, so that the audience need not wait long for the takeover.
LEASE_SECONDS = 3.0

#: Small on purpose: a KV cache that 24 long requests overflow shows preemption at work, and short
#: blocks let prompts of a few words share their beginnings.
WORKER_FLAGS = (
    *("--block-size", "8", "--num-blocks", "320", "--num-host-blocks", "160"),
    *("--max-num-seqs", "24", "--max-num-batched-tokens", "192"),
    *("--lease-seconds", str(LEASE_SECONDS), "--drain-seconds", "10"),
    *("--http-port", "0", "--claim-batch", "8"),
)


class FleetFailed(RuntimeError):
    """A worker ended that should not have, or did not start."""


class Fleet:
    """Worker processes by name. A context manager that leaves none behind.

    `flags` are those of each worker, beside `WORKER_FLAGS`.
    """

    def __init__(
        self,
        *,
        redis_url: str,
        queue: str,
        folder: Path,
        broker: Broker,
        flags: Sequence[str] = (),
    ) -> None:
        self._redis_url = redis_url
        self._flags = (*WORKER_FLAGS, *flags)
        self._queue = queue
        self._folder = folder
        self._broker = broker
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: list[str] = []

    def start(self, name: str) -> None:
        """Start a worker; `wait_until_ready` tells when it serves."""
        environment = os.environ | {"QUIRE_REDIS_URL": self._redis_url}
        # Two workers share the machine; left alone, each would start a thread per core.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
        arguments = ["--queue", self._queue, "--worker-name", name, *self._flags]
        self._processes[name] = self._launch(name, arguments, environment)

    def _launch(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "service", *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def wait_until_ready(self) -> None:
        """Wait until every worker has signed the registry as ready."""
        give_up = time.monotonic() + READY_SECONDS
        while {worker.name for worker in self._broker.workers() if worker.state == "ready"} != set(
            self._processes
        ):
            self.check()
            if time.monotonic() > give_up:
                raise FleetFailed(f"no worker after {READY_SECONDS:.0f} s\n{self._tails()}")
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise FleetFailed if a worker that was not killed has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None and name not in self.killed:
                raise FleetFailed(f"{name} ended with {process.returncode}\n{self._tails()}")

    def kill_busiest(self) -> str:
        """SIGKILL the worker that runs most requests; returns its name."""
        alive = [worker for worker in self._broker.workers() if worker.name in self._processes]
        busiest = max(alive, key=lambda worker: worker.load.get("running", 0.0)).name
        self._processes[busiest].kill()
        self._processes[busiest].wait()
        self.killed.append(busiest)
        return busiest

    def alive(self) -> str:
        """The names of the workers that were not killed."""
        return " and ".join(name for name in self._processes if name not in self.killed)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _tails(self) -> str:
        logs = [(name, self._log(name).read_text(errors="replace")) for name in self._processes]
        return "\n".join(f"-- {name} --\n{text[-LOG_TAIL_CHARACTERS:]}" for name, text in logs)
