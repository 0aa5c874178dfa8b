"""Programs of the service in processes of their own, which a test can stop, freeze and kill.

`killed_in_the_middle` is the one way to have a worker die with a request half done: the worker is
held where it dies, so neither a fast nor a busy machine changes what is left.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any, Self

from tests.service import held
from tests.service.builders import CHECKOUT, LEASE_SECONDS, PATIENCE_SECONDS, Queue, eventually
from tests.service.forked import MODEL, SERVICE, ForkedProgram

#: The worker without a model, the one that serves a model, and the same one if it can be held.
FAKE_WORKER, REAL_WORKER = "tests.service.fake_worker", "service"
HELD_WORKER = "tests.service.worker.process.held_worker"
Program = subprocess.Popen[str] | ForkedProgram


class LoggedProcess:
    """A program of ours in a process of its own, and the events of its log.

    It is forked from a process that has its imports, unless `is_fresh` asks for an interpreter of
    its own, as a test of a start does.
    """

    def __init__(
        self,
        module: str,
        *flags: str,
        is_fresh: bool = False,
        variables: Mapping[str, str] = {},
    ) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        self.log: list[dict[str, Any]] = []
        self.raw_log: list[str] = []
        arguments = ("--http-port", "0", "--log-format", "json", *flags)
        self.process: Program
        if is_fresh:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=CHECKOUT,
                env=environ,
                stderr=subprocess.PIPE,
                text=True,
            )
        else:
            imports = MODEL if module in (REAL_WORKER, HELD_WORKER) else SERVICE
            self.process = ForkedProgram(
                module, arguments, environ=environ, folder=str(CHECKOUT), imports=imports
            )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_ended():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._reader.join()

    def wait_for_event(self, event: str) -> dict[str, Any]:
        """The first log line of that event; fails when the process ends without it."""

        def find() -> dict[str, Any] | None:
            if has_ended := self.has_ended():
                self._reader.join()  # Of what it has written, not all may have been read.
            found = next((line for line in self.log if line["event"] == event), None)
            assert found or not has_ended, "".join(self.raw_log)
            return found

        line = eventually(find, f"log line {event!r}", seconds=2 * PATIENCE_SECONDS)
        assert line is not None
        return line

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        code = self.process.wait(2 * PATIENCE_SECONDS)
        self._reader.join()
        return code

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.raw_log.append(line)
            if line.startswith("{") and line.endswith("\n"):  # A kill may cut the last one.
                self.log.append(json.loads(line))


class WorkerProcess(LoggedProcess):
    """A worker in a process of its own: `python -m service`, or the fake one of these tests.

    Args:
        held_at: the fake worker and HELD_WORKER hardly go on after so many tokens.
    """

    def __init__(
        self,
        queue: Queue,
        *flags: str,
        module: str = FAKE_WORKER,
        held_at: int | None = None,
        is_fresh: bool = False,
    ) -> None:
        self.name = f"process-{uuid.uuid4().hex[:8]}"
        where = ("--redis-url", queue.url, "--queue", queue.name, "--worker-name", self.name)
        times = ("--lease-seconds", str(LEASE_SECONDS), "--block-seconds", "0.05")
        variables = {} if held_at is None else {held.VARIABLE: str(held_at)}
        super().__init__(module, *where, *times, *flags, is_fresh=is_fresh, variables=variables)

    def wait_until_ready(self) -> dict[str, Any]:
        """The line that says where the worker listens."""
        return self.wait_for_event("worker ready")


def killed_in_the_middle(
    queue: Queue,
    request_id: str,
    *flags: str,
    tokens: int,
    module: str = FAKE_WORKER,
    is_fresh: bool = False,
) -> int:
    """A worker comes, says so many tokens of a request, and is killed; its leases end with it.

    Another worker may have said some before. Returns how many tokens are published: a few more, and
    never all, however late a test is.
    """
    said = queue.published(request_id)
    with WorkerProcess(queue, *flags, module=module, held_at=tokens, is_fresh=is_fresh) as worker:
        # On a machine that has never run a model, the kernels are compiled first.
        worker.wait_until_ready()
        queue.wait_for_tokens(request_id, said + tokens)
        worker.kill()
        assert worker.process.poll() == -signal.SIGKILL
    queue.take_all_away()
    return queue.published(request_id)
