"""A process of chaos that logs lines of JSON, and can be ended, killed, stopped and continued."""

import json
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


class LoggedProcess:
    """One process, and what it has logged."""

    def __init__(self, process: BaseProcess, *, name: str, log: Path) -> None:
        self.name = name
        self.is_paused = False
        self._process = process
        self._log = log

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def pause(self) -> None:
        """Returns once the process stands still."""
        self._signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
            os.sched_yield()
        self.is_paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_paused = False

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, seconds: float) -> int | None:
        """The exit code, None if it does not end in time."""
        self._process.join(seconds)
        return self._process.exitcode

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged under this name so far; a line cut off by a kill is left out."""
        if not self._log.exists():
            return []
        lines = self._log.read_text(errors="replace").splitlines()
        whole = (line for line in lines if line.startswith("{") and line.endswith("}"))
        return [event for line in whole if (event := json.loads(line))["event"] == name]

    def log_tail(self, characters: int = 2000) -> str:
        return self._log.read_text(errors="replace")[-characters:] if self._log.exists() else ""

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
