"""The laws: what a witness sees while a schedule is played, and what must hold when it is at rest.

The witness stands behind the server: it sees every transition that really ran, also those whose
caller never heard of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import UnknownRequest
from quire.queue.broker import Broker
from quire.queue.request.status import RequestStatus
from quire.wire.output import Completion, FinishReason, State, TokenChunk
from tests.quire.books import Books, unbalanced
from tests.quire.builders import WITHOUT_EXPIRY, leaked_keys, read_all, token_ids_of
from tests.simulation.system.callers import Notes
from tests.simulation.system.fleet import QUEUE
from tests.simulation.system.plan import Plan, Wanted
from tests.simulation.system.redis_data import Hash, ReplyError, Scores, Stream
from tests.simulation.system.redis_server import RedisServer
from tests.simulation.system.turns import Turns

_PREFIX = f"quire:{{{QUEUE}.0}}:".encode()

#: How many arguments stand before a transition's own: the settings of the broker.
_NUM_SETTINGS = 9

#: Codes of a failure that ends a request whose attempts are spent, and only then: found by whoever
#: would have been the next to try, or told by the worker whose device died under the last one.
GIVEN_UP = ("attempts_spent", "engine_failed")

_TERMINAL = {str(state).encode() for state in State if state.is_terminal}


@dataclass(eq=False)
class Witness:
    """Judges every transition as the server ran it."""

    server: RedisServer
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    #: Requests somebody asked to cancel, and those given another life.
    cancelled: set[str] = field(default_factory=set)
    requeued: set[str] = field(default_factory=set)
    _may_not_run: set[bytes] = field(default_factory=set)
    _turns: Turns = field(default_factory=lambda: Turns(_PREFIX + b"r:"))

    def watch(self, name: str, command: list[bytes], reply: Any) -> None:
        """Told of every transition after it ran."""
        self.counts[name] += 1
        if isinstance(reply, Exception | ReplyError):
            if not str(reply).startswith("NOSCRIPT"):
                self.violations.append(f"{name} failed: {reply}")
            return
        arguments = command[3 + int(command[2]) + _NUM_SETTINGS :]
        if name == "commit":
            self._watch_commit(arguments, reply)
        elif name == "extend":
            self._watch_extension(arguments, reply)
        elif name == "claim" and reply[0] == b"claimed":
            self.counts["claimed"] += 1
            self.counts["claimed by a moment"] += reply[9] != reply[10]
            if arguments[0] in self._may_not_run:
                self.violations.append(f"I9: {arguments[0]!r} was cancelled in the queue and runs")
            values = self.server.database.values
            self.violations += self._turns.broken_by(values, arguments[0])
            self.counts["later turns"] += self._turns.follows_another(values, arguments[0])
        elif name == "claim":
            self.counts["kept for a worker"] += reply[0] == b"kept"
        elif name in {"submit", "requeue"}:
            self._turns.queued(self.server.database.values, arguments[0])
            if name == "requeue":
                self._may_not_run.discard(arguments[0])

    def may_not_run(self, request_id: str) -> None:
        """The request was cancelled: if it is not terminal by a running claim, none may follow."""
        self._may_not_run.add(request_id.encode())

    def forget(self) -> None:
        """The server lost its tail: what was true of it may be no more."""
        self._may_not_run.clear()
        self._turns.forget(self.server.database.values)
        self.counts["rollbacks"] += 1

    def has_open(self) -> bool:
        """Whether a request in the server has not ended."""
        return any(
            fields.get(b"state") not in _TERMINAL
            for key, fields in self.server.database.values.items()
            if isinstance(fields, Hash) and key.startswith(_PREFIX + b"r:")
        )

    def _watch_commit(self, arguments: list[bytes], reply: bytes) -> None:
        items = arguments[0].splitlines()
        for item, answer in zip(items, reply.splitlines(), strict=True):
            # Behind the id there may be a fingerprint.
            epoch, owner, request_id = item.split(b" ")[5:8]
            status = answer.split()[0]
            self.counts[f"commit {status.decode()}"] += 1
            if status == b"ok":
                self._check_fence(request_id, epoch, owner)

    def _watch_extension(self, arguments: list[bytes], reply: bytes) -> None:
        ids, rows = arguments[: len(reply)], arguments[len(reply) :]
        for request_id, answer, before in zip(ids, reply, rows[::8], strict=True):
            self.counts[f"extend {chr(answer)}"] += 1
            if answer == ord("+"):
                _, epoch, _, owner, *_ = before.split()
                self._check_fence(request_id, epoch, owner)

    def _check_fence(self, request_id: bytes, epoch: bytes, owner: bytes) -> None:
        record = self.server.database.values.get(_PREFIX + b"r:" + request_id)
        assert isinstance(record, Hash)
        if (record[b"epoch"], record[b"owner"]) != (epoch, owner):
            who = f"{epoch!r} {owner!r}"
            self.violations.append(f"I4: {request_id!r}: {who} passes the fence of another")


def audit_books(broker: Broker) -> list[str]:
    """I10, at any moment."""
    return [f"I10: {fault}" for fault in unbalanced(broker.connection, broker)]


def audit_at_rest(
    broker: Broker,
    server: RedisServer,
    *,
    plan: Plan,
    witness: Witness,
    notes: Mapping[str, Notes],
) -> list[str]:
    """What is wrong with a world in which everything has ended, as sentences."""
    broken = audit_books(broker)
    broken += [f"I16: {fault}" for fault in Books(broker.connection, broker).mistold()]
    broken += [f"I11: {key} never expires" for key in leaked_keys(broker.connection, broker)]
    broken += not_at_rest(server)
    for wanted in plan.wanted:
        broken += _judge(broker, wanted, plan=plan, witness=witness, notes=notes[wanted.request.id])
    return broken


def audit_after_retention(server: RedisServer, broker: Broker) -> list[str]:
    """What is left when every time has passed."""
    allowed = {f"{broker.keys.prefix}:{name}".encode() for name in WITHOUT_EXPIRY}
    left = [key for key in list(server.database.values) if server.value(key) is not None]
    return [f"I11: {key!r} is still there" for key in left if key not in allowed]


def not_at_rest(server: RedisServer) -> list[str]:
    """I6: no entry waits, none is pending, no lease, no place and no appointment is left."""
    broken = []
    for key, value in server.database.values.items():
        if key.startswith(_PREFIX + b"fair:"):
            # What is counted for tenants stays until it expires.
            continue
        if isinstance(value, Scores) or key in (_PREFIX + b"position", _PREFIX + b"turn"):
            broken.append(f"I6: {key!r} holds {dict(value)}")
        elif isinstance(value, Stream) and value.groups and key not in server.database.expiries:
            held = sum(len(group.pending) for group in value.groups.values())
            if value.ids or held:
                broken.append(f"I6: {key!r} holds {len(value.ids)} entries, {held} pending")
    return broken


def _judge(
    broker: Broker, wanted: Wanted, *, plan: Plan, witness: Witness, notes: Notes
) -> list[str]:
    """The laws of one request."""
    request_id = wanted.request.id
    try:
        status = broker.status(request_id)
    except UnknownRequest:
        # The server lost it after its caller had been told the end; nobody knows of it any more.
        lost = witness.counts["rollbacks"] and notes.is_over
        return [] if lost else [f"I5: {request_id} is gone"]
    chunks, completion = read_all(broker, request_id)
    if completion is None or not status.state.is_terminal:
        return [f"I3: {request_id} is {status.state} and has no end"]
    log = tuple(token_ids_of(chunks))
    broken = _judge_entries(broker, request_id)
    if [chunk.start for chunk in chunks] != [0, *(chunk.end for chunk in chunks)][:-1]:
        broken.append(f"I2: the log of {request_id} has gaps or overlaps")
    if log != wanted.tokens[: len(log)]:
        broken.append(f"I1: the log of {request_id} differs from the undisturbed run")
    if [one for chunk in chunks for one in chunk.logprobs] != [*wanted.logprobs[: len(log)]]:
        broken.append(f"I1: the log of {request_id} says otherwise how likely its tokens were")
    if [one for chunk in chunks for one in chunk.prompt_tokens] != [
        *(wanted.prompt_tokens if log else ())
    ]:
        broken.append(f"I1: the log of {request_id} says otherwise how likely its prompt was")
    if not witness.counts["rollbacks"] and len(notes.seen) > len(log):
        broken.append(f"I1: a reader of {request_id} saw more than the log holds")
    if status.attempts > plan.max_attempts:
        broken.append(f"I7: {request_id} had {status.attempts} attempts")
    return broken + _judge_end(
        completion, status, log=log, chunks=chunks, wanted=wanted, plan=plan, witness=witness
    )


def _judge_end(
    completion: Completion,
    status: RequestStatus,
    *,
    log: tuple[int, ...],
    chunks: list[TokenChunk],
    wanted: Wanted,
    plan: Plan,
    witness: Witness,
) -> list[str]:
    """I5 and I7: the request ended as it may, with all it had to give."""
    broken, request_id = [], wanted.request.id
    text = "".join(chunk.text for chunk in chunks) + completion.tail
    code = completion.error.code if completion.error else ""
    may_be = {
        State.COMPLETED: not wanted.is_poison
        and (log, text, str(completion.finish_reason))
        == (wanted.tokens, wanted.text, wanted.finish_reason),
        State.CANCELLED: request_id in witness.cancelled,
        State.EXPIRED: wanted.deadline is not None,
        State.FAILED: wanted.is_poison or code in GIVEN_UP,
    }
    if not may_be[status.state]:
        broken.append(
            f"I5: {request_id} ended as {status.state} ({code}) with {log} {text!r}, "
            f"wanted {wanted}"
        )
    if code in GIVEN_UP and status.attempts < plan.max_attempts:
        broken.append(f"I7: {request_id} was given up after {status.attempts} attempts")
    if completion.finish_reason is FinishReason.REJECTED:
        broken.append(f"I5: {request_id} was rejected")
    if dict(completion.metadata) != wanted.request.metadata:
        broken.append(f"{request_id} lost its metadata")
    return broken


def _judge_entries(broker: Broker, request_id: str) -> list[str]:
    """I3: exactly one end, and it is the last entry."""
    entries: Any = broker.connection.xrange(broker.keys.output(request_id))
    ends = [b"done" in fields for _, fields in entries]
    return (
        [] if ends.count(True) == 1 and ends[-1] else [f"I3: the ends of {request_id} are {ends}"]
    )
