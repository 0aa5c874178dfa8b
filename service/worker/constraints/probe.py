"""Tries to compile a constraint in a separate process before the worker compiles it.

The library's limits count only a part of its work: one number in a schema can cost minutes and
gigabytes. The process has a CPU timer and a memory limit, so it dies instead of the worker. It also
rehearses the constraint (see `rehearsal`), within the same bounds again. It is
started for the first constraint, and again after each death. Knows no requests and no threads.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from engine.constraint import Constraint as EngineConstraint
from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import CompiledGrammars, key_of

#: The most verdicts that are remembered; the least recently used ones are dropped.
MAX_VERDICTS = 4096
#: The longest compilation, in seconds of CPU time, that generations share. A generation that uses
#: up the shared states of the lexer compiles again in the engine's thread, and all running requests
#: wait for that.
SHARED_SECONDS = 0.3
#: The bounds are this many times larger for a request that already has tokens: it was within the
#: bounds on its first worker, and this machine may be slower.
TAKEOVER_FACTOR = 4.0
#: Wall-clock seconds for each second of the CPU bound. A process that has not answered by then does
#: not compute, or gets no CPU time.
WALL_FACTOR = 30.0
#: How long the process may take to start, even if disk and cores are busy.
START_SECONDS = 60.0
#: How often to poll while waiting for the process. Waiting time is the number of polls and not read
#: from a clock, so time in which the machine sleeps or this process is stopped does not count.
POLL_SECONDS = 0.05
#: How long a process may take to end after its pipes are closed.
END_SECONDS = 1.0
#: Attempts for one constraint if the process dies for another reason than its bounds.
TRIES = 2
#: The longest answer of the process, in bytes.
MAX_ANSWER_BYTES = 1 << 16

_log = structlog.get_logger("service.worker.constraints.probe")


class Verdict(NamedTuple):
    """The reason to refuse a constraint, or ''; and the memory and CPU time of compiling it."""

    refusal: str
    num_bytes: int = 0
    cpu_seconds: float = 0.0


class ProbeFailed(Exception):
    """The process did not start, or was ended from outside: nothing is known of the constraint."""


class Probe:
    """The process that tries constraints for one tokenizer.

    Only `interrupt` may be called from any thread; all other methods belong to one thread.

    Args:
        cpu_seconds: the most CPU time for compiling one constraint.
        memory_bytes: the most memory that compiling it may allocate.
        on_poll: called every POLL_SECONDS while this waits for the process.
    """

    def __init__(
        self,
        grammars: CompiledGrammars,
        *,
        cpu_seconds: float,
        memory_bytes: int,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._grammars = grammars
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._on_poll = on_poll
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        #: Whether the process has closed its end of a pipe.
        self._is_pipe_closed = False
        #: By a digest of the constraint: the factor of its last attempt, and the verdict.
        self._verdicts: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()
        #: How many processes were started.
        self.num_started = 0

    def judge(self, wanted: Constraint, *, factor: float = 1.0) -> Verdict:
        """Whether a constraint can be compiled within `factor` times the bounds.

        Raises:
            ProbeFailed: the constraint could not be tried.
        """
        key = hashlib.sha256(key_of(wanted).encode()).digest()
        tried_with, verdict = self._verdicts.get(key, (0.0, Verdict("")))
        if factor > tried_with and (verdict.refusal or not tried_with):
            verdict = self._try(wanted, factor)
            self._verdicts[key] = factor, verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def interrupt(self) -> None:
        """Kill the process and start no other one; thread-safe. A waiting `judge` raises."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process, start no other one, and wait until the killed one has ended."""
        self.interrupt()
        self._end()

    @property
    def process_id(self) -> int | None:
        """The id of the process; None if there is none."""
        process = self._process
        return process.pid if process is not None else None

    def _try(self, wanted: Constraint, factor: float) -> Verdict:
        cpu_seconds = self._cpu_seconds * factor
        memory_bytes = int(self._memory_bytes * factor)
        job = {
            "kind": wanted.kind,
            "value": wanted.value,
            "field": wanted.field,
            "is_compact": wanted.is_compact,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
            # An output that has begun elsewhere is not refused for what it may never reach.
            "is_new": factor <= 1.0,
        }
        failure = "was ended from outside, or did not answer"
        for _ in range(TRIES):
            try:
                self._start()
            except ProbeFailed as error:
                failure = str(error)
                continue
            found = self._ask(job, seconds=cpu_seconds * WALL_FACTOR)
            if found is not None:
                if found.pop("must_restart"):
                    self._end()
                return Verdict(**found)
            code = self._end(is_dying=self._is_pipe_closed)
            if self._is_closed:
                break
            _log.warning("constraint ended its process", field=wanted.field, exit_code=code)
            refusal = self._refusal(code, cpu_seconds, memory_bytes)
            if refusal:
                return Verdict(refusal)
        raise ProbeFailed(f"the process that tries constraints {failure}")

    def _refusal(self, code: int, cpu_seconds: float, memory_bytes: int) -> str:
        """The reason to refuse a constraint that caused this exit code; '' for other exit codes."""
        if code == -signal.SIGPROF:
            return f"takes more than {cpu_seconds:g} seconds to compile"
        if code == -signal.SIGABRT:
            return f"takes more than {memory_bytes >> 20} MiB of memory to compile"
        if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
            return "makes the library that compiles it crash"
        return ""

    def _start(self) -> None:
        """Make sure that a process waits for a constraint. ProbeFailed."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._is_closed:
            raise ProbeFailed("is closed")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.worker.constraints.probe_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A library writes there when it runs out of memory. The log has only events.
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError as error:
            raise ProbeFailed(f"cannot be started: {error}") from error
        self._kill_if_interrupted()
        self.num_started += 1
        self._is_pipe_closed = False
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        found = self._ask(self._grammars.described, seconds=START_SECONDS)
        if found is None or found["failed"]:
            code = self._end(is_dying=True)
            why = found["failed"] if found else f"exit code {code}"
            raise ProbeFailed(f"does not start: {why}")

    def _kill_if_interrupted(self) -> None:
        """Kill a process that `interrupt` could not see, because it was just being started."""
        if self._is_closed and self._process is not None:
            self._process.kill()

    def _ask(self, document: Mapping[str, Any], *, seconds: float) -> dict[str, Any] | None:
        """The answer to one document; None if the process died or did not answer in `seconds`."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        unsent = memoryview(json.dumps(document).encode() + b"\n")
        answer, polls = b"", 0
        while not answer.endswith(b"\n") and len(answer) < MAX_ANSWER_BYTES:
            sinks = [process.stdin] if unsent else []
            try:
                readable, writable, _ = select.select([process.stdout], sinks, [], POLL_SECONDS)
                if writable:
                    unsent = unsent[os.write(process.stdin.fileno(), unsent[: select.PIPE_BUF]) :]
                if readable:
                    part = os.read(process.stdout.fileno(), MAX_ANSWER_BYTES)
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
        found: dict[str, Any] = json.loads(answer)
        return found

    def _end(self, *, is_dying: bool = False) -> int:
        """End the process; returns its exit code, which is -SIGKILL if it had to be killed."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if is_dying:
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


class ProbedGrammars:
    """Compiles only constraints that a probe found to be within the bounds. See `Grammars`.

    Other threads may call `is_ready`, and `constraint` for a constraint that is ready.
    """

    def __init__(self, grammars: CompiledGrammars, probe: Probe) -> None:
        self._grammars = grammars
        self._probe = probe

    def is_ready(self, wanted: Constraint, /) -> bool:
        """See `Grammars`."""
        return self._grammars.is_ready(wanted)

    def constraint(
        self, wanted: Constraint, output_token_ids: Sequence[int], /
    ) -> EngineConstraint:
        """See `Grammars`."""
        if self._grammars.is_ready(wanted):
            return self._grammars.constraint(wanted, output_token_ids)
        factor = TAKEOVER_FACTOR if output_token_ids else 1.0
        verdict = self._probe.judge(wanted, factor=factor)
        if verdict.refusal:
            raise InvalidRequest(wanted.field, verdict.refusal)
        is_slow = verdict.cpu_seconds > SHARED_SECONDS
        found = self._grammars.constraint(wanted, output_token_ids, is_slow=is_slow)
        self._grammars.set_size(wanted, num_bytes=verdict.num_bytes)
        return found


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
