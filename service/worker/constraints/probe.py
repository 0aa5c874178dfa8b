"""Tries to compile a constraint in a separate process before the worker compiles it.

The library's limits count only a part of its work: one number in a schema can cost minutes and
gigabytes. The process has a CPU timer and a memory limit, so it dies instead of the worker. It also
rehearses the constraint (see `rehearsal`), within the same bounds again. It is
started for the first constraint, and again after each death. Knows no requests and no threads.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from engine.constraint import Constraint as EngineConstraint
from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.worker.bounded.process import (
    START_SECONDS,
    WALL_FACTOR,
    BoundedProcess,
    ProcessFailed,
    why_ended,
)
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
#: The module that the process runs.
PROCESS = "service.worker.constraints.probe_process"
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
        self._process = BoundedProcess(PROCESS, on_poll=on_poll)
        #: By a digest of the constraint: the factor of its last attempt, and the verdict.
        self._verdicts: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()

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
        self._process.interrupt()

    def close(self) -> None:
        """Kill the process, start no other one, and wait until the killed one has ended."""
        self._process.close()

    @property
    def process_id(self) -> int | None:
        """The id of the process; None if there is none."""
        return self._process.process_id

    @property
    def num_started(self) -> int:
        """How many processes were started."""
        return self._process.num_started

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
                    self._process.end()
                return Verdict(**found)
            code = self._process.end()
            if self._process.is_closed:
                break
            _log.warning("constraint ended its process", field=wanted.field, exit_code=code)
            refusal = why_ended(
                code, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes, doing="compile"
            )
            if refusal:
                return Verdict(refusal)
        raise ProbeFailed(f"the process that tries constraints {failure}")

    def _start(self) -> None:
        """Make sure that a process waits for a constraint. ProbeFailed."""
        try:
            if not self._process.start():
                return
        except ProcessFailed as error:
            raise ProbeFailed(str(error)) from error
        found = self._ask(self._grammars.described, seconds=START_SECONDS)
        if found is None or found["failed"]:
            code = self._process.end(is_dying=True)
            why = found["failed"] if found else f"exit code {code}"
            raise ProbeFailed(f"does not start: {why}")

    def _ask(self, document: Mapping[str, Any], *, seconds: float) -> dict[str, Any] | None:
        """The answer to one document; None if the process died or did not answer in `seconds`."""
        question = json.dumps(document).encode() + b"\n"
        answer = self._process.ask(question, is_whole=_is_line, seconds=seconds)
        found: dict[str, Any] | None = None if answer is None else json.loads(answer)
        return found


def _is_line(answer: bytearray) -> bool:
    return answer.endswith(b"\n") or len(answer) >= MAX_ANSWER_BYTES


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
