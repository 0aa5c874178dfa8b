"""The status of a request, as its record, its log position and its log tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import BrokerUnavailable, UnknownRequest
from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.transport.connection import is_refused
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.transport.script_calls import raise_if_error
from quire.wire.codec import reading, unpack_map
from quire.wire.output import Activity, State, split_entry_id
from quire.wire.protocol import Priority

#: What a status reads of the record.
STATUS_FIELDS = (
    *("state", "priority", "tenant", "session", "metadata", "submitted_ms", "deadline_ms"),
    *("attempts", "resumes", "owner", "worker", "activity", "cancel"),
    *("published", "prefix", "resumed_from", "fingerprint"),
)


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A snapshot of the request record, taken `at_ms` on the broker's clock.

    `published` is the number of tokens in the log, `prefix_hash` their hash; see TokenChunk. Of a
    request that has ended the `metadata` is with its completion, and empty here. `activity` is what
    a request that is RUNNING does in its worker, as the worker last told; None in other states.
    `waits_for` is the first open turn of its session, for which a QUEUED turn waits; None if it
    waits for a worker alone. `worker` is the name of the one that claimed it last; None before the
    first claim, and if that worker told no name.
    """

    request_id: str
    state: State
    priority: Priority
    published: int
    attempts: int
    resumes: int
    cancel_requested: bool
    deadline_ms: int | None
    submitted_ms: int
    fingerprint: str | None
    prefix_hash: str = ""
    tenant: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    at_ms: int = 0
    activity: Activity | None = None
    session_id: str | None = None
    waits_for: str | None = None
    worker: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """How long until its time is over; 0 once a caller has cancelled it, None without an end.

        An open one that has no time left is waiting for somebody to end it.
        """
        if self.cancel_requested or self.deadline_ms is None:
            return 0.0 if self.cancel_requested else None
        return max(0, self.deadline_ms - self.at_ms) / 1000


def status(keys: Keys, request_id: str) -> Procedure[RequestStatus]:
    """See `Side.status`."""
    position, values, time = yield RoundTrip(
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
    found = status_of(request_id, fields, position=position, time=time)
    if found.state is State.RUNNING and found.published and position is None:
        # The server may have lost the log position, and with it what EXTEND has added.
        found = yield from _with_tokens_of_log(keys, found)
    if found.state is State.QUEUED and found.session_id is not None:
        return replace(found, waits_for=(yield from _earlier_turn(keys, found)))
    return found


def kept(keys: Keys, request_id: str) -> Procedure[bytes | None]:
    """See `Side.kept`."""
    (value,) = yield RoundTrip((command("hget", keys.request(request_id), "kept"),))
    return bytes(value) if value else None


def status_of(
    request_id: str,
    fields: Mapping[bytes, bytes],
    *,
    position: bytes | None = None,
    time: tuple[int, int] = (0, 0),
) -> RequestStatus:
    """Reads the fields of a request record and its log position; ProtocolError if unreadable.

    `time` is when they were read, as TIME says it.

    The log position is to be read before the record. Then what is told never falls behind what was
    told before: whatever takes a log position away has brought the record up to it.
    """
    with reading(f"the record of {request_id}"):
        status = replace(_status_of(request_id, fields), at_ms=ms_of(time))
        if position and status.state is State.RUNNING:
            *_, tokens, _, prefix = position.decode().split(" ")
            if int(tokens) > status.published:
                status = replace(status, published=int(tokens), prefix_hash=prefix)
        return replace(status, activity=_activity_of(status, fields))


def _activity_of(status: RequestStatus, fields: Mapping[bytes, bytes]) -> Activity | None:
    """What a running request does: as its worker told, or else by the tokens of this claim."""
    if status.state is not State.RUNNING:
        return None
    word, _, owner = fields.get(b"activity", b"").partition(b" ")
    # A worker that has lost its claim told something else, and a later version may have new words.
    if owner == fields.get(b"owner") and word.decode() in set(Activity):
        return Activity(word.decode())
    has_new_tokens = status.published > int(fields.get(b"resumed_from", 0))
    return Activity.DECODING if has_new_tokens else Activity.WAITING


def _status_of(request_id: str, fields: Mapping[bytes, bytes]) -> RequestStatus:
    deadline_ms = int(fields[b"deadline_ms"])
    fingerprint = fields.get(b"fingerprint")
    return RequestStatus(
        request_id=request_id,
        state=State(fields[b"state"].decode()),
        priority=Priority(int(fields[b"priority"])),
        published=int(fields[b"published"]),
        attempts=int(fields[b"attempts"]),
        resumes=int(fields[b"resumes"]),
        cancel_requested=fields.get(b"cancel") == b"1",
        deadline_ms=deadline_ms or None,
        submitted_ms=int(fields[b"submitted_ms"]),
        fingerprint=fingerprint.decode() if fingerprint else None,
        prefix_hash=fields.get(b"prefix", b"").decode(),
        tenant=fields[b"tenant"].decode(),
        session_id=fields[b"session"].decode() if b"session" in fields else None,
        worker=fields.get(b"worker", b"").decode(errors="replace") or None,
        metadata=unpack_map(fields[b"metadata"]) if fields.get(b"metadata") else {},
    )


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


def _earlier_turn(keys: Keys, turn: RequestStatus) -> Procedure[str | None]:
    """The first open turn of the session of a turn; None if that is the turn itself."""
    session = f"{turn.tenant}:{turn.session_id}"
    (found,) = yield RoundTrip(
        (command("zrangebylex", keys.turns, f"[{session} ", f"({session}!", start=0, num=1),)
    )
    first = found[0].decode().rpartition(" ")[2] if found else turn.request_id
    return None if first == turn.request_id else first


def states_of(request_ids: Sequence[str], replies: Sequence[Any]) -> dict[str, State]:
    """The states in the replies to a transition, without empty replies. Raises the first error."""
    return {
        request_id: State(reply.decode())
        for request_id, reply in zip(request_ids, map(raise_if_error, replies), strict=True)
        if reply
    }
