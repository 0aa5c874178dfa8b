"""The batches of a queue: those that have not ended, those that ended last, and runs of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.batch.runs import TELL_SECONDS, RunRecord, runs_in
from quire.errors import ProtocolError
from quire.queue.clock import ms_of
from quire.queue.roles import Observer
from quire.transport.procedure import Procedure, RoundTrip, command
from service.shared.batches.records import ENDED, BatchRecord

#: The most batches of each list, and how many members of the set of ends are looked at for them:
#: it also has the files.
MAX_BATCHES, MAX_LOOKED_AT = 50, 200

#: After so long without a word, a run that has not ended is shown as silent.
SILENT_MS = int(10_000 * TELL_SECONDS)


@dataclass(frozen=True, slots=True)
class ShownBatch:
    """One batch. `held_ms`: until when a batcher holds it, None if none does."""

    record: BatchRecord
    held_ms: int | None = None

    @property
    def is_open(self) -> bool:
        return self.record.status not in ENDED

    @property
    def share(self) -> float:
        """The lines with a result as a share of all, 0 to 1; 0 before the lines are counted."""
        counts = self.record.counts
        done = counts.completed + counts.failed
        return min(1.0, done / counts.total) if counts.total else 0.0


@dataclass(frozen=True, slots=True)
class BatchesState:
    """Open batches, and ended ones, the one that is kept longest first.

    `runs` are those of `quire run-batch`, the one that told last at first.
    """

    open: Sequence[ShownBatch]
    num_open: int
    ended: Sequence[ShownBatch]
    at_ms: int
    runs: Sequence[RunRecord] = ()

    def is_silent(self, run: RunRecord) -> bool:
        """Whether a run has told nothing for long; for one that has not ended."""
        return self.at_ms - run.told_ms > SILENT_MS


def batches_of(broker: Observer) -> BatchesState:
    """The batches of a queue; `broker` is that of shard 0. BrokerUnavailable."""
    return broker.run(_read(broker))


def _read(broker: Observer) -> Procedure[BatchesState]:
    keys = broker.keys
    work, num_open, ends, told, time = yield RoundTrip(
        (
            command("zrange", keys.batch_work, 0, MAX_BATCHES - 1, withscores=True),
            command("zcard", keys.batch_work),
            command("zrevrange", keys.batch_ends, 0, MAX_LOOKED_AT - 1),
            # Those who write it keep it short.
            command("hgetall", keys.runs),
            command("time"),
        )
    )
    now_ms, runs = ms_of(time), runs_in(told)[:MAX_BATCHES]
    open_ids = [_text(name) for name, _ in work]
    members = [_text(member).partition(":") for member in ends]
    ended_ids = [name for kind, _, name in members if kind == "batch"][:MAX_BATCHES]
    ids = [*open_ids, *ended_ids]
    if not ids:
        return BatchesState((), int(num_open), (), now_ms, runs)
    rows = yield RoundTrip(
        tuple(command("hgetall", keys.batch(one)) for one in ids), keeps_errors=True
    )
    until = {_text(name): int(score) for name, score in work}
    found = [
        ShownBatch(record, until[one] if until.get(one, 0) > now_ms else None)
        for one, fields in zip(ids, rows, strict=True)
        if (record := _record(one, fields)) is not None
    ]
    return BatchesState(
        open=sorted((b for b in found if b.is_open), key=lambda b: -b.record.created_ms),
        num_open=int(num_open),
        ended=[b for b in found if not b.is_open],
        at_ms=now_ms,
        runs=runs,
    )


def _record(batch_id: str, fields: Any) -> BatchRecord | None:
    """The record; None for what is gone or is not one of ours."""
    if not isinstance(fields, dict):
        return None
    try:
        return BatchRecord.of(batch_id, fields)
    except ProtocolError:
        return None


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
