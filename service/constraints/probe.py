"""Tries a constraint in a process of its own before the worker compiles it; bounded from outside.

The library's limits count only a part of its work: one number in a schema can cost minutes and
gigabytes. The process has a CPU timer and a memory limit, so it dies in the worker's place; it is
started at the first constraint and again after each death. Knows no requests and no threads.
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
from service.constraints.grammars import CompiledGrammars

#: The most verdicts that are remembered; the least recently used are dropped.
MAX_VERDICTS = 4096
#: The longest compilation, in CPU time, that generations share. One that uses up the shared states
#: of the lexer is compiled anew by the engine's thread, where all running requests wait for it.
SHARED_SECONDS = 0.3
#: How many times the bounds a request gets that has tokens already: it was within them on the
#: worker that began it, and this machine may be slower.
TAKEOVER_FACTOR = 4.0
#: Wall-clock time for each second of CPU time: a process that has not answered after so long does
#: not compute, or gets no time to.
WALL_FACTOR = 30.0
#: How long the process may take to start, on a machine whose disk and cores are busy.
START_SECONDS = 60.0
#: Between two looks while it is waited for. Counted, not read off a clock: a machine that slept, or
#: a process that was stopped, has not waited meanwhile.
LOOK_SECONDS = 0.05
#: How long the end of a process may take whose pipes are closed already.
END_SECONDS = 1.0
#: Tries of one constraint when the process dies by something else than its bounds.
TRIES = 2
#: The most bytes of one answer.
MAX_ANSWER_BYTES = 1 << 16

_log = structlog.get_logger("service.constraints.probe")


class Verdict(NamedTuple):
    """Why a constraint is refused, or '' if it is not; and what compiling it costs."""

    refusal: str
    num_bytes: int = 0
    cpu_seconds: float = 0.0


class ProbeFailed(Exception):
    """The process cannot be started, or was ended by somebody else: nothing is known."""


class Probe:
    """The process that tries constraints for one tokenizer. For one thread, but for `interrupt`.

    Args:
        cpu_seconds: what compiling one constraint may take.
        memory_bytes: what it may allocate.
        on_look: called every LOOK_SECONDS while the process is waited for.
    """

    def __init__(
        self,
        grammars: CompiledGrammars,
        *,
        cpu_seconds: float,
        memory_bytes: int,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._grammars = grammars
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._on_look = on_look
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        #: The process has closed its end.
        self._hung_up = False
        #: By a digest of the constraint: the factor it was tried with, and what came of it.
        self._verdicts: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()
        #: How many processes were started.
        self.num_started = 0

    def judge(self, wanted: Constraint, *, factor: float = 1.0) -> Verdict:
        """Whether a constraint can be compiled within `factor` times the bounds.

        Raises:
            ProbeFailed: it could not be tried.
        """
        key = hashlib.sha256(f"{wanted.kind} {json.dumps(wanted.value)}".encode()).digest()
        tried_with, verdict = self._verdicts.get(key, (0.0, Verdict("")))
        if factor > tried_with and (verdict.refusal or not tried_with):
            verdict = self._tried(wanted, factor)
            self._verdicts[key] = factor, verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def interrupt(self) -> None:
        """Kill the process for good, from any thread; a `judge` that waits for it raises."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process for good, and take leave of it."""
        self.interrupt()
        self._end()

    @property
    def process_id(self) -> int | None:
        """The process that runs now."""
        process = self._process
        return process.pid if process is not None else None

    def _tried(self, wanted: Constraint, factor: float) -> Verdict:
        cpu_seconds = self._cpu_seconds * factor
        memory_bytes = int(self._memory_bytes * factor)
        job = {
            "kind": wanted.kind,
            "value": wanted.value,
            "field": wanted.field,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        failure = "was ended by others"
        for _ in range(TRIES):
            try:
                self._start()
            except ProbeFailed as error:
                failure = str(error)
                continue
            found = self._ask(job, seconds=cpu_seconds * WALL_FACTOR)
            if found is not None:
                if found.pop("worn"):
                    self._end()
                return Verdict(**found)
            code = self._end(is_dying=self._hung_up)
            if self._is_closed:
                break
            _log.warning("constraint ended its process", field=wanted.field, exit_code=code)
            refusal = self._refusal(code, cpu_seconds, memory_bytes)
            if refusal:
                return Verdict(refusal)
        raise ProbeFailed(f"the process that tries constraints {failure}")

    def _refusal(self, code: int, cpu_seconds: float, memory_bytes: int) -> str:
        """What a death by the constraint's own doing says about it; '' for another death."""
        if code == -signal.SIGPROF:
            return f"takes more than {cpu_seconds:g} seconds to compile"
        if code == -signal.SIGABRT:
            return f"takes more than {memory_bytes >> 20} MiB of memory to compile"
        if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
            return "makes the library that compiles it crash"
        return ""

    def _start(self) -> None:
        """Have a process that waits for a constraint."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._is_closed:
            raise ProbeFailed("is closed")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.constraints.probe_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A library that is short of memory says so there, and the log has only events.
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError as error:
            raise ProbeFailed(f"cannot be started: {error}") from error
        self.num_started += 1
        self._hung_up = False
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        found = self._ask(self._grammars.described, seconds=START_SECONDS)
        if found is None or found["failed"]:
            code = self._end(is_dying=True)
            why = found["failed"] if found else f"exit code {code}"
            raise ProbeFailed(f"does not start: {why}")

    def _ask(self, told: Mapping[str, Any], *, seconds: float) -> dict[str, Any] | None:
        """The answer to one document; None if the process died, or was killed after `seconds`."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        unsent = memoryview(json.dumps(told).encode() + b"\n")
        answer, looks = b"", 0
        while not answer.endswith(b"\n") and len(answer) < MAX_ANSWER_BYTES:
            sinks = [process.stdin] if unsent else []
            try:
                readable, writable, _ = select.select([process.stdout], sinks, [], LOOK_SECONDS)
                if writable:
                    unsent = unsent[os.write(process.stdin.fileno(), unsent[: select.PIPE_BUF]) :]
                if readable:
                    part = os.read(process.stdout.fileno(), MAX_ANSWER_BYTES)
                    if not part:
                        self._hung_up = True
                        return None
                    answer += part
            except OSError:
                # The other end is gone.
                self._hung_up = True
                return None
            if not readable and not writable:
                self._on_look()
                looks += 1
                if looks * LOOK_SECONDS > seconds:
                    return None
        found: dict[str, Any] = json.loads(answer)
        return found

    def _end(self, *, is_dying: bool = False) -> int:
        """End the process; returns its exit code, -SIGKILL for one that had to be killed."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if is_dying:
            # It has closed its pipes a moment before it can be waited for.
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
    """Compiles what a probe has found to be within the bounds. See `Grammars`.

    For one thread, but for `is_ready` and for what is ready.
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
        self._grammars.weigh(wanted, num_bytes=verdict.num_bytes)
        return found


def _environment() -> dict[str, str]:
    """Without our settings, which may hold a password; with one thread and one heap."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    paths = [path or str(Path.cwd()) for path in sys.path]
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return {
        **kept,
        **one,
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
    }
