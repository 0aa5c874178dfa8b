"""The reads of a producer as procedures, which Broker and AsyncBroker run. Knows no connection.

A procedure says which commands are sent and how their replies are read. Those about groups are in
grouping.py, that about missing workers is in absence.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import BrokerUnavailable, UnknownRequest
from quire.keys import Keys
from quire.queue.publish.output_log import OutputRead, log_positions, logs_in
from quire.queue.replies import ms_of, status_of, workers_in
from quire.queue.values import RequestStatus
from quire.queue.workers.workers import WorkerInfo
from quire.record import STATUS_FIELDS
from quire.transport.connection import is_refused
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.output import State, split_entry_id


def now_ms() -> Procedure[int]:
    """See `Broker.now_ms`."""
    (time,) = yield RoundTrip((command("time"),))
    return ms_of(time)


def status(keys: Keys, request_id: str) -> Procedure[RequestStatus]:
    """See `Broker.status`."""
    place, values, time = yield RoundTrip(
        (
            command("hget", keys.log_positions, request_id),
            # Not HGETALL: a record may keep a megabyte, and every waiting reader looks at it.
            command("hmget", keys.request(request_id), STATUS_FIELDS),
            command("time"),
        )
    )
    named = zip(STATUS_FIELDS, values, strict=True)
    fields = {name.encode(): value for name, value in named if value is not None}
    if not fields:
        raise UnknownRequest(request_id)
    found = status_of(request_id, fields, place=place, time=time)
    if found.state is State.RUNNING and found.published and place is None:
        # The server may have lost the place, and with it what EXTEND has added.
        found = yield from _with_tokens_of_log(keys, found)
    if found.state is State.QUEUED and found.session_id is not None:
        return replace(found, waits_for=(yield from _earlier_turn(keys, found)))
    return found


def _with_tokens_of_log(keys: Keys, found: RequestStatus) -> Procedure[RequestStatus]:
    """The status with the tokens of the log if that has more than the record says."""
    newest = command("xrevrange", keys.output(found.request_id), count=1)
    try:
        (entries,) = yield RoundTrip((newest,))
    except BrokerUnavailable as error:
        if not is_refused(error):
            raise
        # The key is no stream. Whoever reads the log is told so.
        return found
    if not entries:
        return found
    ((entry_id, fields),) = entries
    index, _ = split_entry_id(entry_id)
    tokens = index if b"done" in fields else index + 1
    if tokens <= found.published:
        return found
    return replace(found, published=tokens, prefix_hash=fields.get(b"prefix", b"").decode())


def kept(keys: Keys, request_id: str) -> Procedure[bytes | None]:
    """See `Broker.kept`."""
    (value,) = yield RoundTrip((command("hget", keys.request(request_id), "kept"),))
    return bytes(value) if value else None


def _earlier_turn(keys: Keys, turn: RequestStatus) -> Procedure[str | None]:
    """The first open turn of the session of a turn; None if that is the turn itself."""
    session = f"{turn.tenant}:{turn.session_id}"
    (found,) = yield RoundTrip(
        (command("zrangebylex", keys.turns, f"[{session} ", f"({session}!", start=0, num=1),)
    )
    first = found[0].decode().rpartition(" ")[2] if found else turn.request_id
    return None if first == turn.request_id else first


def read_output(
    keys: Keys, seen: Mapping[str, int], *, count: int, block_seconds: float | None = None
) -> Procedure[dict[str, OutputRead]]:
    """See `Broker.read_output`; `count` is the most entries of one log.

    The first chunk of an answer may start beyond `seen` only if the log itself has a gap.
    """
    if not seen:
        return {}
    after = log_positions(keys, seen)
    (reply,) = yield read_streams(after, count=count, block_seconds=block_seconds)
    return logs_in(reply, keys, seen)


def read_streams(after: Mapping[Any, Any], *, count: int, block_seconds: float | None) -> RoundTrip:
    """An XREAD from these cursors; None does not wait."""
    # 0 would block for ever.
    block_ms = None if block_seconds is None else max(1, int(block_seconds * 1000))
    read = command("xread", after, count=count, block=block_ms)
    return RoundTrip((read,), wait_seconds=(block_ms or 0) / 1000)


def workers(keys: Keys) -> Procedure[list[WorkerInfo]]:
    """See `Broker.workers`."""
    (rows,) = yield RoundTrip((command("hgetall", keys.workers),))
    now = yield from now_ms()
    return sorted(workers_in(rows, now_ms=now), key=lambda info: info.name)
