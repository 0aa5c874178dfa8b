"""The records of files and batches in Redis: every read and transition, as procedures.

A procedure is written once. The gateway runs it in its event loop and the batcher in a thread (see
quire/transport/procedure.py). All keys lie in shard 0 of the queue; keys.py describes them.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio

from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.scripts import BATCHES
from quire.queue.shard import Shard
from quire.queue.shard_async import AsyncShard
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.transport.script_calls import Argument, Ask, ScriptCall, raise_if_error
from service.shared.batches.records import BatchRecord, FileRecord

#: How long a file may be uploaded before its reservation is given up.
RESERVED_MS = 6 * 3600 * 1000

#: When the deletion of a file is tried again that was interrupted, or that a batch still reads.
AGAIN_MS = 60_000

#: The most records of one read of a list.
MAX_LISTED = 100

#: How long a call is retried while Redis does not answer.
RETRY_SECONDS = 2.0

#: The transitions after which a caller of a durable queue relies on what it has sent.
_DURABLE = frozenset({"publish_file", "create_batch"})

_Record = TypeVar("_Record", FileRecord, BatchRecord)


@dataclass(frozen=True, slots=True)
class Hold:
    """A batcher's claim of a batch: the proof that every write of it needs."""

    batch_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class Listed(Generic[_Record]):
    """Records in order. `last` is the cursor for the next ones; None if there are no more."""

    records: Sequence[_Record]
    last: str | None


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result file whose content is in the storage; `file_id` is empty if there is none."""

    file_id: str = ""
    num_bytes: int = 0


class Ledger(Shard):
    """Runs procedures in a thread. For `sources` see ScriptRunner."""

    def __init__(
        self,
        connection: redis.Redis,
        queue: str,
        *,
        durable: bool = False,
        retry_seconds: float = RETRY_SECONDS,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            connection,
            Keys(queue),
            settings=(),
            lease_seconds=0.0,
            retry_seconds=retry_seconds,
            durable=durable,
            sources=sources,
        )


class AsyncLedger(AsyncShard):
    """Runs procedures in an event loop, over the connection of a client."""

    def __init__(self, connection: redis.asyncio.Redis, queue: str, *, durable: bool) -> None:
        keys = Keys(queue)
        super().__init__(
            connection,
            keys,
            settings=(),
            lease_seconds=0.0,
            retry_seconds=RETRY_SECONDS,
            durable=durable,
        )


# -- files ----------------------------------------------------------------------------------------


def reserve_file(keys: Keys, file_id: str, *, tenant: str) -> Procedure[None]:
    """Makes the record of a file before its content is stored, so that no content is forgotten."""
    fields = ("tenant", tenant)
    yield from _asked(
        "reserve_file", (keys.file(file_id), keys.batch_ends), file_id, RESERVED_MS, *fields
    )


def publish_file(
    keys: Keys,
    file_id: str,
    *,
    tenant: str,
    seconds: int,
    max_files: int,
    fields: Mapping[str, Argument],
) -> Procedure[str]:
    """Makes the file visible: `published`, `full` at the tenant's limit, or empty if it is gone."""
    names = (keys.file(file_id), keys.batch_ends, keys.files(tenant))
    reply = yield from _asked(
        "publish_file", names, file_id, 1000 * seconds, max_files, *_flat(fields)
    )
    return str(reply.decode())


def delete_file(keys: Keys, file_id: str, *, tenant: str) -> Procedure[str]:
    """Hides a file: `deleted`, `used` by an open batch, or empty if it is gone.

    Then delete the content, and call `forget_file`. A batcher repeats both if that is interrupted.
    """
    reply = yield from _asked("delete_file", _of_file(keys, file_id, tenant), file_id, AGAIN_MS)
    return str(reply.decode())


def forget_file(keys: Keys, file_id: str, *, tenant: str) -> Procedure[None]:
    """Deletes the record of a file whose content is gone."""
    yield from _asked("forget", _of_file(keys, file_id, tenant), "file", file_id)


def read_file(keys: Keys, file_id: str) -> Procedure[FileRecord | None]:
    """The file; None if it is not published, or its time is over."""
    fields, time = yield RoundTrip((command("hgetall", keys.file(file_id)), command("time")))
    record = FileRecord.of(file_id, fields)
    return record if record and record.expires_ms > ms_of(time) else None


def list_files(
    keys: Keys, tenant: str, *, after: str | None, is_ascending: bool, count: int
) -> Procedure[Listed[FileRecord] | None]:
    """The next files after one of them; None if there is no such file. Without expired ones."""
    ids_of = (keys.files(tenant), keys.deleted_files(tenant))
    ids = yield from _next_ids(*ids_of, after=after, is_ascending=is_ascending, count=count)
    if ids is None:
        return None
    *found, time = yield RoundTrip(
        (*(command("hgetall", keys.file(one)) for one in ids), command("time"))
    )
    records = [FileRecord.of(one, fields) for one, fields in zip(ids, found, strict=True)]
    live = [record for record in records if record and record.expires_ms > ms_of(time)]
    return Listed(live, ids[-1] if len(ids) == count else None)


# -- batches: the gateway's side ------------------------------------------------------------------


def create_batch(
    keys: Keys,
    batch_id: str,
    *,
    tenant: str,
    digest: str,
    input_file_id: str,
    window_ms: int,
    max_open: int,
    max_records: int,
    fields: Mapping[str, Argument],
) -> Procedure[str]:
    """Creates a batch: `created`, `known`, `different`, `full` or `no_file`, see the script."""
    names = (
        keys.batch(batch_id),
        keys.batches(tenant),
        keys.batch_work,
        keys.open_batches,
        keys.file(input_file_id),
    )
    limits = (window_ms, max_open, max_records)
    reply = yield from _asked(
        "create_batch", names, batch_id, tenant, digest, *limits, *_flat(fields)
    )
    return str(reply.decode())


def read_batch(keys: Keys, batch_id: str) -> Procedure[BatchRecord | None]:
    """The batch; None if there is none."""
    (fields,) = yield RoundTrip((command("hgetall", keys.batch(batch_id)),))
    return BatchRecord.of(batch_id, fields)


def list_batches(
    keys: Keys, tenant: str, *, after: str | None, is_ascending: bool, count: int
) -> Procedure[Listed[BatchRecord] | None]:
    """The next batches after one of them; None if there is no such batch."""
    ids_of = (keys.batches(tenant), keys.deleted_batches(tenant))
    ids = yield from _next_ids(*ids_of, after=after, is_ascending=is_ascending, count=count)
    if ids is None:
        return None
    *found, _ = yield RoundTrip(
        (*(command("hgetall", keys.batch(one)) for one in ids), command("time"))
    )
    records = [BatchRecord.of(one, fields) for one, fields in zip(ids, found, strict=True)]
    live = [record for record in records if record]
    return Listed(live, ids[-1] if len(ids) == count else None)


def cancel_batch(keys: Keys, batch_id: str) -> Procedure[str]:
    """Asks for the end of a batch; returns its status after that, empty if there is none."""
    reply = yield from _asked("cancel_batch", (keys.batch(batch_id),))
    return str(reply.decode())


# -- batches: the batcher's side ------------------------------------------------------------------


def free_batches(keys: Keys, *, count: int) -> Procedure[list[str]]:
    """Batches that nobody holds, the one that is free for longest first."""
    (time,) = yield RoundTrip((command("time"),))
    (found,) = yield RoundTrip(
        (command("zrangebyscore", keys.batch_work, "-inf", ms_of(time), start=0, num=count),)
    )
    return [one.decode() for one in found]


def claim_batch(keys: Keys, batch_id: str, *, lease_ms: int) -> Procedure[Hold | None]:
    """The claim of a batch; None if it is held, has ended or is gone."""
    owner = secrets.token_hex(16)
    names = (keys.batch(batch_id), keys.batch_work, keys.ends, keys.control)
    epoch = yield from _asked("claim_batch", names, batch_id, owner, lease_ms)
    return Hold(batch_id, int(epoch), owner) if epoch else None


def save_batch(
    keys: Keys,
    hold: Hold,
    *,
    lease_ms: int,
    status: str = "",
    fields: Mapping[str, Argument] | None = None,
) -> Procedure[str]:
    """Renews the lease and stores fields; the status after that, empty if the claim is lost.

    A lease of 0 gives the batch back.
    """
    names = (keys.batch(hold.batch_id), keys.batch_work)
    proof = (hold.batch_id, hold.epoch, hold.owner)
    reply = yield from _asked("save_batch", names, *proof, lease_ms, status, *_flat(fields or {}))
    return str(reply.decode())


def finish_batch(
    keys: Keys,
    hold: Hold,
    record: BatchRecord,
    *,
    status: str,
    keep_ms: int,
    output_ms: int,
    output: ResultFile,
    errors: ResultFile,
    fields: Mapping[str, Argument],
) -> Procedure[str]:
    """Ends a batch, tells its end and publishes its files.

    Returns the status after that, empty if the claim is lost.
    """
    names = (
        keys.batch(hold.batch_id),
        keys.batch_work,
        keys.batch_ends,
        keys.open_batches,
        keys.file(record.input_file_id),
        keys.files(record.tenant),
        keys.file(output.file_id),
        keys.file(errors.file_id),
        keys.ends,
        keys.control,
    )
    proof = (hold.batch_id, hold.epoch, hold.owner)
    files = (output.file_id, output.num_bytes, errors.file_id, errors.num_bytes)
    reply = yield from _asked(
        "finish_batch", names, *proof, status, keep_ms, output_ms, *files, *_flat(fields)
    )
    return str(reply.decode())


def due_ends(keys: Keys, *, count: int) -> Procedure[list[tuple[str, str, str]]]:
    """What is to be deleted now: kind (`file` or `batch`), id, and tenant."""
    (time,) = yield RoundTrip((command("time"),))
    (found,) = yield RoundTrip(
        (command("zrangebyscore", keys.batch_ends, "-inf", ms_of(time), start=0, num=count),)
    )
    if not found:
        return []
    ends = [one.decode().partition(":") for one in found]
    names = [keys.file(name) if kind == "file" else keys.batch(name) for kind, _, name in ends]
    tenants = yield RoundTrip(tuple(command("hget", name, "tenant") for name in names))
    return [
        (kind, name, (tenant or b"").decode())
        for (kind, _, name), tenant in zip(ends, tenants, strict=True)
    ]


def forget_batch(keys: Keys, batch_id: str, *, tenant: str) -> Procedure[None]:
    """Deletes the record of an ended batch."""
    indexes = (keys.batch_ends, keys.batches(tenant), keys.deleted_batches(tenant))
    yield from _asked("forget", (keys.batch(batch_id), *indexes), "batch", batch_id)


# -- what they share ------------------------------------------------------------------------------


def _asked(transition: str, names: Sequence[str], *arguments: Argument) -> Procedure[Any]:
    call = ScriptCall(names, arguments)
    (reply,) = yield Ask(f"{BATCHES}{transition}", [call], must_be_durable=transition in _DURABLE)
    return raise_if_error(reply)


def _of_file(keys: Keys, file_id: str, tenant: str) -> tuple[str, ...]:
    indexes = (keys.batch_ends, keys.files(tenant), keys.deleted_files(tenant))
    return (keys.file(file_id), *indexes)


def _next_ids(
    index: str, deleted: str, *, after: str | None, is_ascending: bool, count: int
) -> Procedure[list[str] | None]:
    """The ids after one of an index, in this order; None if the index never had that one.

    `deleted` has when the ids that the index had lately were created.
    """
    first = 0
    if after is not None:
        rank = "zrank" if is_ascending else "zrevrank"
        (found,) = yield RoundTrip((command(rank, index, after),))
        if found is None:
            found = yield from _last_before(index, deleted, after, is_ascending=is_ascending)
        if found is None:
            return None
        first = int(found) + 1
    (ids,) = yield RoundTrip(
        (command("zrange", index, first, first + count - 1, desc=not is_ascending),)
    )
    return [one.decode() for one in ids]


def _last_before(
    index: str, deleted: str, name: str, *, is_ascending: bool
) -> Procedure[int | None]:
    """The rank of the id before a deleted one, or -1; None if that is unknown."""
    (entries,) = yield RoundTrip((command("xrevrange", deleted),))
    gone = name.encode()
    times = (fields.get(b"created", b"") for _, fields in entries if fields.get(b"id") == gone)
    if not (created := next(times, b"")).isdigit():
        return None
    older, same, total = yield RoundTrip(
        (
            command("zcount", index, "-inf", f"({int(created)}"),
            command("zrangebyscore", index, created, created),
            command("zcard", index),
        )
    )
    before: int = older + sum(one < gone for one in same)
    return before - 1 if is_ascending else int(total) - before - 1


def _flat(fields: Mapping[str, Argument]) -> Iterable[Argument]:
    for name, value in fields.items():
        yield name
        yield value
