"""What a run of a batch file tells of itself, for pages that show it: the hash `runs` of shard 0.

A run tells its progress every TELL_SECONDS and at its end. It never waits for that and never fails
by it: without Redis, or without the right to write this key, it only stays unseen.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from quire.batch.progress import BatchOptions, BatchProgress
from quire.queue.clock import ms_of
from quire.queue.producer import Producer
from quire.transport.procedure import Procedure, RoundTrip, command, run, send
from quire.wire.codec import pack_own, readable, reading, unpack_map

#: How often a run tells its progress.
TELL_SECONDS = 2.0

#: A run that has told nothing for so long is forgotten; so are the oldest beyond this number.
MEMORY_MS, MAX_RUNS = 86_400_000, 100

#: The most characters of a name that are told.
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as it last told, at `told_ms` on the clock of Redis.

    `total`, `completed` and `failed` count lines; `inflight` are its open requests. `tokens` were
    generated since it began at `began_ms`. `ending` is empty while it runs, and afterwards
    completed, expired or cancelled. `host` is the name of its machine.
    """

    id: str
    name: str
    host: str
    tenant: str
    model: str
    total: int
    completed: int
    failed: int
    inflight: int
    tokens: int
    began_ms: int
    told_ms: int
    ending: str

    @classmethod
    def of(cls, run_id: bytes, data: bytes) -> RunRecord:
        """Reads what a run has told. ProtocolError."""
        fields = unpack_map(data)
        with reading("a run of a batch file"):
            return cls(
                id=run_id.decode(),
                name=str(fields["name"]),
                host=str(fields["host"]),
                tenant=str(fields["tenant"]),
                model=str(fields["model"]),
                total=int(fields["total"]),
                completed=int(fields["completed"]),
                failed=int(fields["failed"]),
                inflight=int(fields["inflight"]),
                tokens=int(fields["tokens"]),
                began_ms=int(fields["began_ms"]),
                told_ms=int(fields["told_ms"]),
                ending=str(fields["ending"]),
            )

    @property
    def share(self) -> float:
        """The lines with a result as a share of all, 0 to 1."""
        return min(1.0, (self.completed + self.failed) / self.total) if self.total > 0 else 0.0


def runs_in(fields: Mapping[bytes, bytes]) -> list[RunRecord]:
    """The runs in the hash, the one that told last at first, without unreadable ones."""
    found: Sequence[RunRecord] = readable(RunRecord.of, fields.items())
    return sorted(found, key=lambda one: one.told_ms, reverse=True)


class RunTeller:
    """Tells the progress of one run. A run that goes on with the same files is the same run."""

    def __init__(self, broker: Producer, output: Path, options: BatchOptions, *, name: str) -> None:
        self._broker = broker
        host = _told(platform.node())
        place = f"{host}\0{output.absolute()}\0{options.name}"
        self._id = hashlib.sha256(place.encode(errors="replace")).hexdigest()[:32]
        self._about = {
            "name": _told(name),
            "host": host,
            "tenant": options.tenant,
            "model": _told(options.model or ""),
        }
        self._began_ms: int | None = None
        self._tell_at = 0.0
        self._may_tell = True

    def before(
        self, on_progress: Callable[[BatchProgress], None] | None
    ) -> Callable[[BatchProgress], None]:
        """Tells each progress, and then calls the other."""

        def tell(progress: BatchProgress) -> None:
            self.tell(progress)
            if on_progress is not None:
                on_progress(progress)

        return tell

    def tell(self, progress: BatchProgress) -> None:
        """Tells the progress if it is time for it, and that of the end at once."""
        if not self._may_tell or (progress.ending is None and time.monotonic() < self._tell_at):
            return
        self._tell_at = time.monotonic() + TELL_SECONDS
        try:
            # Not by the broker, which repeats for a long time what fails.
            run(self._telling(progress), partial(send, self._broker.connection))
        except NoPermissionError:
            self._may_tell = False
        except RedisError:
            return

    def _telling(self, progress: BatchProgress) -> Procedure[None]:
        key = self._broker.keys.runs
        stale: Sequence[bytes] = ()
        if self._began_ms is None:
            now, fields = yield RoundTrip((command("time"), command("hgetall", key)))
            stale = _stale(fields, now_ms=ms_of(now))
            self._began_ms = ms_of(now)
        else:
            (now,) = yield RoundTrip((command("time"),))
        told = {
            **self._about,
            **{name: getattr(progress, name) for name in ("total", "completed", "failed")},
            "inflight": progress.inflight,
            "tokens": progress.tokens,
            "ending": progress.ending or "",
            "began_ms": self._began_ms,
            "told_ms": ms_of(now),
        }
        writes = [
            command("hset", key, self._id, pack_own(told)),
            command("pexpire", key, MEMORY_MS),
        ]
        if stale:
            writes.append(command("hdel", key, *stale))
        yield RoundTrip(tuple(writes))


def _told(text: str) -> str:
    """As much of a text as is told. The name of a file may have bytes that are not UTF-8."""
    return text[:MAX_NAME].encode(errors="replace").decode()


def _stale(fields: Mapping[bytes, Any], *, now_ms: int) -> list[bytes]:
    """The ids that a new run removes: of those that are too old, too many, or unreadable."""
    known = runs_in(fields)[: MAX_RUNS - 1]
    kept = {one.id.encode() for one in known if now_ms - one.told_ms < MEMORY_MS}
    return [run_id for run_id in fields if run_id not in kept]
