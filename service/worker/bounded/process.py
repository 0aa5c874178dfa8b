"""Starts a bounded process, exchanges bytes with it, and says why it died. Knows no work."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

#: How long the process may take to start, even if disk and cores are busy.
START_SECONDS = 60.0
#: Wall-clock seconds for each second of the CPU bound. A process that has not answered by then does
#: not compute, or gets no CPU time.
WALL_FACTOR = 30.0
#: How often to poll while waiting for the process. Waiting time is the number of polls and not read
#: from a clock, so time in which the machine sleeps or this process is stopped does not count.
POLL_SECONDS = 0.05
#: How long a process may take to end after its pipes are closed.
END_SECONDS = 1.0
#: The most bytes of one read from a pipe, and of one write to it.
PART_BYTES = 1 << 16


class ProcessFailed(Exception):
    """The process did not start, or was ended from outside: nothing is known of its work."""


class BoundedProcess:
    """The process that runs `module`. It is started by `start`, and again after each death.

    Only `interrupt` may be called from any thread; all other methods belong to one thread, with
    which the process ends. `on_poll` is called every POLL_SECONDS while this waits for the process.
    """

    def __init__(self, module: str, *, on_poll: Callable[[], None] = lambda: None) -> None:
        self._module = module
        self._on_poll = on_poll
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether the process has closed its end of a pipe.
        self._is_pipe_closed = False
        #: Whether no process may be started any more.
        self.is_closed = False
        #: How many processes were started.
        self.num_started = 0

    @property
    def process_id(self) -> int | None:
        """The id of the process; None if there is none."""
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> bool:
        """Make sure that there is a process; returns whether it is a new one. ProcessFailed."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.end()
        if self.is_closed:
            raise ProcessFailed("is closed")
        try:
            # The module is one of ours.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A library writes there when it runs out of memory. The log has only events.
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError as error:
            raise ProcessFailed(f"cannot be started: {error}") from error
        self._kill_if_interrupted()
        self.num_started += 1
        self._is_pipe_closed = False
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return True

    def _kill_if_interrupted(self) -> None:
        """Kill a process that `interrupt` could not see, because it was just being started."""
        if self.is_closed and self._process is not None:
            self._process.kill()

    def ask(
        self, question: bytes, *, is_whole: Callable[[bytearray], bool], seconds: float
    ) -> bytearray | None:
        """The answer, once it `is_whole`; None if the process died or was silent for `seconds`."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        unsent, answer, polls = memoryview(question), bytearray(), 0
        while not is_whole(answer):
            sinks = [process.stdin] if unsent else []
            try:
                readable, writable, _ = select.select([process.stdout], sinks, [], POLL_SECONDS)
                if writable:
                    unsent = unsent[os.write(process.stdin.fileno(), unsent[:PART_BYTES]) :]
                if readable:
                    part = os.read(process.stdout.fileno(), PART_BYTES)
                    if not part:
                        self._is_pipe_closed = True
                        return None
                    answer += part
            except OSError:
                # The process has closed its end.
                self._is_pipe_closed = True
                return None
            if not readable and not writable:
                self._on_poll()
                polls += 1
                if polls * POLL_SECONDS > seconds:
                    return None
        return answer

    def end(self, *, is_dying: bool = False) -> int:
        """End the process; returns its exit code, which is -SIGKILL if it had to be killed.

        One that `is_dying`, or has closed a pipe, gets END_SECONDS to end by itself.
        """
        process, self._process = self._process, None
        if process is None:
            return 0
        if is_dying or self._is_pipe_closed:
            # A dying process closes its pipes a moment before `wait` can return.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return code

    def interrupt(self) -> None:
        """Kill the process and start no other one; thread-safe. A waiting `ask` returns None."""
        self.is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process, start no other one, and wait until the killed one has ended."""
        self.interrupt()
        self.end()


def why_ended(code: int, *, cpu_seconds: float, memory_bytes: int, doing: str) -> str:
    """Why work ended its process with this exit code, for its caller; '' for other exit codes."""
    if code == -signal.SIGPROF:
        return f"takes more than {cpu_seconds:g} seconds to {doing}"
    if code == -signal.SIGABRT:
        return f"takes more than {memory_bytes >> 20} MiB of memory to {doing}"
    if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
        return f"makes the library crash that has to {doing} it"
    return ""


def _environment() -> dict[str, str]:
    """The environment of the process, for one thread and one heap.

    Without the settings of the worker (`QUIRE_*`), because one of them may be a password.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    paths = [path or str(Path.cwd()) for path in sys.path]
    single_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
    )
    return {
        **inherited,
        **single_thread,
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
    }
