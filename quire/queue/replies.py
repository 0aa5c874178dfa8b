"""Turns what scripts and hashes answer into records. Knows their layout and no connection."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from quire.errors import ProtocolError, QueueFull
from quire.queue.publish.output_log import OutputRead
from quire.queue.rank.fairness import Fairness
from quire.queue.values import (
    Backlog,
    Claim,
    Claimed,
    DeadLetter,
    NotClaimed,
    NotClaimedReason,
    QueueLimits,
    QueuePolicy,
    RequestStatus,
)
from quire.queue.workers.workers import WorkerInfo
from quire.wire.codec import unpack_map
from quire.wire.output import Activity, State
from quire.wire.protocol import Priority

_Record = TypeVar("_Record")
_log = logging.getLogger(__name__)


def claim_answer(request_id: str, owner: str, reply: Sequence[Any]) -> Claimed | NotClaimed:
    """Reads the reply of claim.lua. ProtocolError when what was claimed is not ours."""
    if reply[0] != b"claimed":
        reason = NotClaimedReason(reply[0].decode())
        seconds = int(reply[2]) / 1000 if len(reply) > 2 else 0.0
        return NotClaimed(request_id, reason, ended=bool(reply[1]), retry_seconds=seconds)
    with reading(f"what was claimed of {request_id}"):
        return _claimed(request_id, owner, reply)


def _claimed(request_id: str, owner: str, reply: Sequence[Any]) -> Claimed:
    _, epoch, body, attempts, submitted_ms, fingerprint, cancel, entries, trial_tokens = reply[:9]
    arrival, moment, deadline_ms, due_ms, answer_limit = reply[9:]
    if body is None:
        raise ProtocolError("the message of the request is gone")
    log = [(entry_id, _pairs(fields)) for entry_id, fields in entries]
    return Claimed(
        claim=Claim(request_id, int(epoch), owner),
        request_bytes=body,
        published=OutputRead(request_id, log, seen=0).chunks,
        attempts=int(attempts),
        enqueued_ms=int(submitted_ms),
        fingerprint=fingerprint.decode() or None,
        cancel_requested=bool(cancel),
        trial_tokens=int(trial_tokens),
        arrival_us=int(arrival),
        ranked_us=int(moment),
        deadline_ms=int(deadline_ms) or None,
        due_ms=int(due_ms) or None,
        answer_limit=int(answer_limit) if answer_limit else None,
    )


def ms_of(time: tuple[int, int]) -> int:
    """Unix milliseconds of what TIME answers: seconds and microseconds."""
    seconds, microseconds = time
    return seconds * 1000 + microseconds // 1000


def status_of(
    request_id: str,
    fields: Mapping[bytes, bytes],
    *,
    place: bytes | None = None,
    time: tuple[int, int] = (0, 0),
) -> RequestStatus:
    """Reads the fields of a request record, and its place. ProtocolError when they are not ours.

    `time` is when they were read, as TIME says it.

    The place is to be read before the record. Then what is told never falls behind what was told
    before: whatever takes a place away has brought the record up to it.
    """
    with reading(f"the record of {request_id}"):
        status = replace(_status_of(request_id, fields), at_ms=ms_of(time))
        if place and status.state is State.RUNNING:
            *_, tokens, _, prefix = place.decode().split(" ")
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
        metadata=unpack_map(fields[b"metadata"]) if fields.get(b"metadata") else {},
    )


#: What each limit of SUBMIT is about.
_LIMITS = {
    "requests": "the backlog limit of the queue is reached: too many requests wait",
    "tokens": "the backlog limit of the queue is reached: too many tokens wait",
    "tenant": "the tenant {tenant} has as many open requests in the queue as it may",
    "rate": "the tenant {tenant} has used its tokens per minute; try again in {seconds:.1f} s",
}


def full_queue(*, limit: str, tenant: str, wait_ms: bytes | int = b"") -> QueueFull:
    """The refusal of submit.lua. `wait_ms`: when it may be let in at the rate of its tenant."""
    seconds = int(wait_ms) / 1000 if wait_ms else None
    message = _LIMITS[limit].format(tenant=tenant, seconds=seconds or 0.0)
    return QueueFull(message, limit=limit, retry_after_seconds=seconds)


def dead_letter_of(entry_id: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """Reads an entry of the dead stream. ProtocolError when it is not ours."""
    with reading(f"the dead letter {entry_id!r}"):
        return DeadLetter(
            entry_id=entry_id.decode(),
            request_id=fields[b"id"].decode(),
            reason=fields[b"reason"].decode(),
            attempts=int(fields[b"attempts"]),
            original=fields[b"bytes"],
        )


def limit_fields(limits: QueueLimits) -> dict[str, int]:
    """The fields of the control hash that hold these limits."""
    plain = {name: getattr(limits, name) for name in _LIMIT_NAMES}
    fields = {f"max_{name}": limit for name, limit in plain.items() if limit is not None}
    fields |= {f"max_of:{tenant}": limit for tenant, limit in limits.tenants.items()}
    return fields | {f"max_rate_of:{tenant}": rate for tenant, rate in limits.rates.items()}


def limits_of(fields: Mapping[bytes, bytes]) -> QueueLimits:
    """Reads the limits among the fields of the control hash. ProtocolError."""
    found = {name: fields.get(f"max_{name}".encode()) for name in _LIMIT_NAMES}
    with reading("a limit of the queue"):
        return QueueLimits(
            **{name: int(limit) for name, limit in found.items() if limit},
            tenants=_of_tenants(fields, prefix=b"max_of:"),
            rates=_of_tenants(fields, prefix=b"max_rate_of:"),
        )


#: The value of the field `fairness` while tenants share a queue by tokens.
BY_TOKENS = "tokens"


def fairness_fields(fairness: Fairness) -> dict[str, str]:
    """The fields of the control hash that hold this."""
    fields = {"fairness": BY_TOKENS} if fairness.by_tokens else {}
    return fields | {f"weight:{name}": str(one) for name, one in fairness.weights.items()}


def fairness_of(fields: Mapping[bytes, bytes]) -> Fairness:
    """Reads the fairness among the fields of the control hash. ProtocolError."""
    with reading("the fairness of the queue"):
        by_tokens = fields.get(b"fairness", b"").decode() == BY_TOKENS
        return Fairness(by_tokens, _of_tenants(fields, prefix=b"weight:"))


def backlog_of(fields: Mapping[bytes, bytes]) -> Backlog:
    """Reads the counts hash. ProtocolError."""
    with reading("a count of the queue"):
        return Backlog(int(fields.get(b"tokens", 0)), _of_tenants(fields, prefix=b"tenant:"))


#: The fields of the control hash that hold the policy.
POLICY_FIELDS = ("policy", "aging_ms", "size_scale")


def policy_of(fields: Mapping[bytes, bytes | None]) -> QueuePolicy | None:
    """Reads the announced policy among the fields of the control hash; None if there is none.

    ProtocolError.
    """
    name = fields.get(b"policy")
    if not name:
        return None
    with reading("the policy of the queue"):
        aging_ms, size_scale = (int(fields[key] or 0) for key in (b"aging_ms", b"size_scale"))
        return QueuePolicy(name.decode(), aging_ms, size_scale)


_LIMIT_NAMES = ("requests", "tokens", "per_tenant", "rate")


def _of_tenants(fields: Mapping[bytes, bytes], *, prefix: bytes) -> dict[str, int]:
    return {
        name.removeprefix(prefix).decode(): int(value)
        for name, value in fields.items()
        if name.startswith(prefix)
    }


def worker_of(name: bytes, value: bytes, *, now_ms: int) -> WorkerInfo:
    """Reads a field of the workers hash: last seen, state and load, parted by spaces.

    ProtocolError when it is not ours.
    """
    with reading(f"the word of worker {name!r}"):
        seen_ms, state, load = value.split(b" ", 2)
        seconds = max(0, now_ms - int(seen_ms)) / 1000
        known = unpack_map(load)
        adapters = dict(known.get("adapters", {}))
        return WorkerInfo(
            name.decode(),
            state.decode(),
            seconds,
            # Of what a later version tells, whoever prints numbers can only leave out the rest.
            {key: value for key, value in known.items() if isinstance(value, int | float)},
            model=str(known.get("model", "")),
            adapters={str(adapter): str(revision) for adapter, revision in adapters.items()},
            policy=str(known.get("policy", "")),
        )


def workers_in(registry: Mapping[bytes, bytes], *, now_ms: int) -> list[WorkerInfo]:
    """The workers that have signed a registry, without those whose word cannot be read."""
    return readable(partial(worker_of, now_ms=now_ms), registry.items())


def readable(read: Callable[[Any, Any], _Record], rows: Iterable[tuple[Any, Any]]) -> list[_Record]:
    """What can be read of the rows; one that is not ours must not hide those that are."""
    found = []
    for row in rows:
        try:
            found.append(read(*row))
        except ProtocolError as error:
            _log.warning("left out: %s", error)
    return found


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """ProtocolError in place of what Python raises when `what` is read and is not ours."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{what} is damaged: {error!r}") from error


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
