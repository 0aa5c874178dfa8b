"""One program of `quire serve` as a process: it never outlives the command, and its log is read."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.cli.local import make_private

#: The size at which a log gets a new file; the file before is kept, and no more than that.
MAX_LOG_BYTES = 16 << 20
#: A longer line of a log is read as several.
MAX_LINE_BYTES = 64 << 10
#: How many last lines of a log are kept for a message.
NUM_LAST_LINES = 20
#: Of Linux: which signal a process gets when its parent has ended.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Program:
    """How a program is started.

    Args:
        name: what a person and the name of its log call it, such as `worker-1`.
        kind: redis, worker, gateway or console.
        at_orphanage: the signal that it gets when the command is killed.
        kept_open: file descriptors that it inherits.
    """

    name: str
    kind: str
    command: Sequence[str]
    environ: Mapping[str, str] | None = None
    at_orphanage: signal.Signals = signal.SIGKILL
    kept_open: tuple[int, ...] = ()

    def with_environment(self, environ: Mapping[str, str]) -> Program:
        """The same program in another environment than that of the command."""
        return replace(self, environ=environ)


class LogFile:
    """A file to which a log is appended, and the one before it: bounded together."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        make_private(path.parent)
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Appends; on a full disk nothing, because the log must not end what it tells of."""
        with contextlib.suppress(OSError):
            self._file.write(data)
            if self._file.tell() >= self._max_bytes:
                self._begin_anew()

    def _begin_anew(self) -> None:
        """Goes on in a new file. Where none can be had, the old one is emptied at twice its size.

        OSError, after which it can be written to as before.
        """
        try:
            # It is missing if someone has removed it, or if the last attempt has failed below.
            with contextlib.suppress(FileNotFoundError):
                self._path.replace(self._path.with_suffix(".before.log"))
            fresh = self._path.open("ab", buffering=0)
        except OSError:
            if self._file.tell() >= 2 * self._max_bytes:
                self._file.truncate(0)
            raise
        full, self._file = self._file, fresh
        full.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Child:
    """A program that runs, or did; `start` starts it again.

    For one thread, which must not end before the process does: the kernel takes the end of the
    thread that starts a process for the end of its parent.
    """

    def __init__(self, program: Program, log: LogFile) -> None:
        self.program = program
        #: When it ended without being asked to, in seconds of the clock that the caller uses.
        self.deaths: deque[float] = deque()
        #: The lines that were no events, such as a message before the log is set up.
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        #: The last event of the level `critical`.
        self.last_words: Mapping[str, Any] | None = None
        #: Whether it has closed its log.
        self.is_silent = False
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def process_id(self) -> int | None:
        """The id of the process that runs or has ended last; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def output(self) -> int:
        """The file descriptor from which the log of a process can be read."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def memory_bytes(self) -> int | None:
        """The memory that its process has; None where the system does not tell."""
        try:
            resident = Path(f"/proc/{self.process_id}/statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):
            return None
        return int(resident) * resource.getpagesize()

    def start(self) -> None:
        """Starts it, for the first time or again. OSError."""
        # Ctrl-C in a terminal goes to the whole group of the command. In groups of their own the
        # programs get no signal but those that the command sends, in its order.
        self._process = subprocess.Popen(  # noqa: S603
            list(self.program.command),
            env=self.program.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=self.program.kept_open,
            # This process has one thread, so no lock can be held in the copy of it.
            preexec_fn=partial(_end_with, _prctl(), os.getpid(), self.program.at_orphanage),  # noqa: PLW1509
        )
        self._unread, self.is_silent, self.last_words = b"", False, None
        self.last_lines.clear()
        os.set_blocking(self.output, False)

    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it, as for `subprocess`."""
        return None if self._process is None else self._process.poll()

    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it runs; SIGKILL also goes to the processes that it has started."""
        if self._process is None or self._process.poll() is not None:
            return
        if number is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        self._process.send_signal(number)

    def events(self, show: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """The events that the log has now, and that were not read; `show` gets each line."""
        for line in self._lines():
            show(line)
            event = _event_in(line)
            if event is None:
                self.last_lines.append(line)
                continue
            if event.get("level") == "critical":
                self.last_words = event
            yield event

    def close(self) -> None:
        """Closes the pipe of a process that has ended."""
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.close()

    def why_it_ended(self) -> str:
        """What its log said last, for a person."""
        if self.last_words is not None:
            reason = self.last_words.get("reason") or self.last_words.get("exception") or ""
            return f"{self.last_words['event']}: {str(reason).strip()}".removesuffix(": ")
        return "\n".join(self.last_lines) or "it has said nothing"

    def _lines(self) -> Iterator[str]:
        # Asked before the last read, so that all that the process has written is read.
        has_ended = not self.is_running()
        while data := self._read():
            self._log.write(data)
            *lines, self._unread = (self._unread + data).split(b"\n")
            if len(self._unread) >= MAX_LINE_BYTES:
                lines, self._unread = [*lines, self._unread], b""
            yield from (line.decode(errors="replace") for line in lines)
        if self._unread and (has_ended or self.is_silent):
            line, self._unread = self._unread, b""
            yield line.decode(errors="replace")

    def _read(self) -> bytes:
        """What can be read without waiting."""
        try:
            data = os.read(self.output, MAX_LINE_BYTES)
        except BlockingIOError:
            return b""
        self.is_silent = not data
        return data


def _event_in(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event.get("event"), str) else None


def _prctl() -> Callable[..., int] | None:
    """The function of Linux; None on other systems, where a killed command leaves its programs."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)
    return function


def _end_with(prctl: Callable[..., int] | None, parent: int, number: signal.Signals) -> None:
    """Runs in the new process: from now on it ends when its parent does."""
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)
