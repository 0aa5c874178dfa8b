"""The worker processes of chaos: forked from one server that has imported everything already.

Each is a process of its own with its own Redis connections and threads, started in a moment. Only
what a control doctors differs from the real service: a Lua transition, or the model.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import script_runner
from service.config import load_settings
from service.logs import configure_logs
from service.worker import Worker
from tests.service import fake_model

#: Controls by name: in which transition, None for all of them, which text becomes which.
DOCTORED = {
    "fence switched off": (None, "and fields.epoch == epoch and fields.owner == owner", ""),
    "rewind ignored": ("commit", "if item.start > published then", "if false then"),
    "replays written": ("commit", "local replay = item.start < published", "local replay = false"),
    "entries kept": (
        "claim",
        (
            "redis.call('XACK', stream, 'workers', entry_id)\n"
            "  return redis.call('XDEL', stream, entry_id)"
        ),
        "return 1",
    ),
}
#: A control that gives the process another model: what its vocabulary has to do without.
OTHER_MODEL = "another model"
OTHER_NEVER = (*fake_model.NEVER, 65)

#: Linux: the signal a process gets when its parent dies.
PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "tokenizers", "pydantic_settings"])


class ChaosWorker:
    """One worker process: it can be asked to drain, killed, stopped and continued."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        name: str,
        log: Path,
        step_seconds: float | None = None,
        doctored: str = "",
    ) -> None:
        self.name = name
        self.is_paused = False
        self._log = log
        argv = [*flags, "--worker-name", name, "--log-format", "json", "--http-port", "0"]
        self._process = _context.Process(
            target=_run, args=(argv, str(log), step_seconds, doctored), name=name, daemon=True
        )
        self._process.start()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def pause(self) -> None:
        """Returns once the process stands still."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
            os.sched_yield()
        self.is_paused = True

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)
        self.is_paused = False

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, seconds: float) -> int | None:
        """The exit code, None if it does not end in time."""
        self._process.join(seconds)
        return self._process.exitcode

    def events(self) -> list[dict[str, Any]]:
        """What it has logged so far; a line cut off by a kill is left out."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def log_tail(self, characters: int = 2000) -> str:
        return self._log.read_text(errors="replace")[-characters:]


def doctored_source(control: str, name: str, source: str) -> str:
    """The text of a transition as a control wants it."""
    where, sound, broken = DOCTORED[control]
    if where not in (None, name) or (where is None and sound not in source):
        return source
    assert sound in source, f"{name}.lua has changed: {control!r} does not apply any more"
    return source.replace(sound, broken)


def _run(argv: Sequence[str], log: str, step_seconds: float | None, doctored: str) -> None:
    # No worker may outlive the schedule, least of all one that stands still.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["worker", *argv]
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        del os.environ[name]
    if doctored == OTHER_MODEL:
        fake_model.NEVER = OTHER_NEVER  # type: ignore[assignment]
    elif doctored:
        load = script_runner.load_source
        script_runner.load_source = lambda name: doctored_source(doctored, name, load(name))  # type: ignore[assignment]
    settings = load_settings()
    configure_logs(level=settings.log_level, style=settings.log_format)
    if step_seconds is None:
        worker = Worker(settings)
    else:
        pause = step_seconds
        worker = Worker(
            settings,
            load=lambda known: fake_model.fake_model(known, before_run=lambda _: time.sleep(pause)),
        )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    code = worker.run()
    # Whatever library left a thread behind must not keep a drained worker alive.
    os._exit(code)
