"""Judges a stage once the play is over: what its requests, readers and keys have come to."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from redis import Redis
from redis.exceptions import ResponseError

from quire import Client
from quire.errors import OutputRewound, QuireError, RequestFailed
from quire.keys import GROUP
from quire.wire.output import State
from tests.chaos.audit import Expected, Log, first_difference, log_violations, read_log
from tests.chaos.callers import Caller
from tests.chaos.orders import Turn, told_violations, turn_violations

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

#: How long the result of an ended request may take.
RESULT_SECONDS = 30.0


def judge(stage: "Stage") -> None:
    """Audits every log and every reader; gathers the figures."""
    outcome = stage.outcome
    for caller in stage.callers:
        outcome.violations += _judge(stage, caller)
    outcome.violations += turn_violations(_turns_of(stage))
    outcome.violations += told_violations(_told_of(stage), _ended_of(stage))
    for client in stage.clients:
        if client.has_failed:
            outcome.violations.append(f"{client.name} died: {client.log_tail()}")
    for worker in stage.workers:
        outcome.figures.update(worker.counts)
        outcome.figures["reaps"] += len(worker.events("leases reaped"))
    outcome.figures["lost_replies"] += stage.wire.num_lost


def left_over(stage: "Stage") -> Iterator[str]:
    """Whatever is not at rest."""
    connection, keys = stage.connection, stage.keys
    for stream in keys.all_ingress:
        if length := connection.xlen(stream):
            yield f"{stream} holds {length} entries at rest"
        if pending := _num_pending(connection, stream):
            yield f"{stream} has {pending} pending entries at rest"
    lasting = (keys.dead, keys.workers, keys.control, keys.arrival, keys.ends, keys.ends_read)
    stay = {key.encode() for key in (*keys.all_ingress, *lasting)}
    books = {key.encode() for key in (keys.open, keys.counts)}
    for key in connection.scan_iter(match=f"{keys.prefix}:*"):
        if connection.type(key) == b"zset":
            # Leases, moments that are due: what waits for a time waits for nothing any more.
            yield f"{key.decode()} holds {connection.zcard(key)} at rest"
        elif key in books:
            yield f"{key.decode()} holds {connection.hgetall(key)} at rest"
        elif key not in stay and connection.ttl(key) == -1:
            yield f"{key.decode()} never expires"


def _num_pending(connection: Redis, stream: str) -> int:
    """Entries that somebody has read and not acknowledged; 0 for a stream that was deleted."""
    try:
        found: int = connection.xpending(stream, GROUP)["pending"]
    except ResponseError as error:
        if not str(error).startswith("NOGROUP"):
            raise
        return 0
    return found


def _judge(stage: "Stage", caller: Caller) -> Iterator[str]:
    notes, wanted, figures = caller.notes, caller.wanted, stage.outcome.figures
    entries = stage.connection.xrange(stage.keys.output(caller.request_id))
    remembered = [c for c in caller.cancellations if c.num_losses == stage.num_losses]
    expected = Expected(
        caller.request_id,
        wanted.tokens,
        wanted.text,
        may_be_cancelled=bool(caller.cancellations),
        sealed=next((c.entries for c in remembered if c.answer.is_terminal), None),
    )
    claims = stage.claims_of(caller)
    if any(cancellation.claims != claims for cancellation in remembered):
        yield f"{caller.request_id}: claimed after it was cancelled"
    yield from notes.violations
    yield from log_violations(expected, entries, max_attempts=stage.cast.max_attempts)
    log = read_log(caller.request_id, entries)
    if first_difference(notes.token_ids, log.token_ids) is not None:
        yield from _withdrawn(stage, caller, has_ended=log.completion is not None)
    elif notes.ended and not stage.has_lost_data and len(notes.token_ids) < len(log.token_ids):
        yield f"{caller.request_id}: a reader saw the end before the last tokens"
    if log.completion is not None:
        attempts = stage.broker.status(caller.request_id).attempts
        if attempts != log.completion.attempts:
            yield f"{caller.request_id}: claimed again after its end"
        yield from _result_violations(stage, caller, log)
        figures[f"ended_{log.completion.state}"] += 1
        figures["resumed_requests"] += log.completion.resumes > 0
        figures["preemptions"] += log.completion.preemptions
    figures["tokens"] += len(log.token_ids)
    figures["reader_rewinds"] += notes.rewinds
    figures["departures"] += notes.departures
    figures["resubmits"] += notes.resubmits
    figures["requests"] += 1


def _result_violations(stage: "Stage", caller: Caller, log: Log) -> Iterator[str]:
    """What a caller is told who comes only now and asks for everything at once."""
    name, completion = caller.request_id, log.completion
    assert completion is not None
    try:
        result = Client(stage.broker).result(name, timeout=RESULT_SECONDS)
    except RequestFailed as error:
        if completion.state is State.COMPLETED:
            yield f"{name}: completed, but its caller was told {error!r}"
    except QuireError as error:
        yield f"{name}: whoever asks for the result is told {error!r}"
    else:
        if (result.token_ids, result.text) != (log.token_ids, log.text):
            yield f"{name}: the result is not what the log holds"


def _turns_of(stage: "Stage") -> Iterator[Turn]:
    for caller in stage.callers:
        if session := caller.wanted.request.session_id:
            record = stage.keys.request(caller.request_id)
            fields = stage.connection.hmget(record, "claimed_ms", "finished_ms")
            claimed, finished = (None if value is None else int(value) for value in fields)
            stage.outcome.figures["turns"] += 1
            yield Turn(caller.request_id, session, claimed, finished)


def _told_of(stage: "Stage") -> Iterator[tuple[str, str]]:
    for _, fields in stage.connection.xrange(stage.keys.ends):
        stage.outcome.figures["ends_told"] += 1
        yield fields[b"id"].decode(), fields[b"state"].decode()


def _ended_of(stage: "Stage") -> dict[str, str]:
    """The state of each request whose log has an end."""
    ids = [caller.request_id for caller in stage.callers]
    logs = {name: read_log(name, stage.connection.xrange(stage.keys.output(name))) for name in ids}
    return {name: log.completion.state for name, log in logs.items() if log.completion}


def _withdrawn(stage: "Stage", caller: Caller, *, has_ended: bool) -> Iterator[str]:
    """A reader that has more than the log holds must be told so when it comes back."""
    name, notes = caller.request_id, caller.notes
    if not stage.has_lost_data:
        yield f"{name}: what a reader saw is no beginning of the log"
    if not has_ended:
        # Without an end there is nothing that would tell a reader anything, and that is named.
        return
    try:
        reader = Client(stage.broker)
        list(reader.stream(name, after=len(notes.token_ids), prefix_hash=notes.prefix_hash))
    except OutputRewound:
        stage.outcome.figures["reader_rewinds"] += 1
    except QuireError as error:
        yield f"{name}: a reader ahead of the log was told {error!r}"
    else:
        yield f"{name}: a reader ahead of the log was told nothing"
