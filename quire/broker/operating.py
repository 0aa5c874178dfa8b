"""What an operator asks of the broker: dead letters, pauses, limits, and who is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.broker import reading
from quire.broker.absence import absence
from quire.broker.inspection import MAX_PENDING_SEEN
from quire.broker.shard import Shard
from quire.errors import InvalidRequest, UnknownRequest
from quire.keys import GROUP
from quire.transitions.calls import requeue_call
from quire.transitions.replies import (
    backlog_of,
    dead_letter_of,
    limit_fields,
    limits_of,
    readable,
)
from quire.transitions.values import Backlog, DeadLetter, QueueLimits, WorkerInfo
from quire.transport.procedure import command
from quire.wire.output import State
from quire.wire.protocol import Priority

#: The longest reason of a pause, in characters.
MAX_REASON_LENGTH = 500

#: How many open requests one look of `open_of` goes through, or a few more.
OPEN_PER_LOOK = 1000

#: What the fields of the control hash begin with that ask a worker to drain.
_DRAIN = "drain:"


class Operating(Shard):
    """The operator's side of a Broker."""

    def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        """The newest dead letters, newest first; what cannot be read is left out."""
        rows = self._read(command("xrevrange", self.keys.dead, count=count))
        return readable(dead_letter_of, rows)

    def requeue(self, letter: DeadLetter, *, keep_tokens: bool) -> State:
        """Gives the request of a dead letter another life under its id; returns its state then.

        It is `queued` with all its attempts before it, and the letter is gone. The tokens it has
        published are kept and continued, or dropped; they are gone anyway once its retention has
        passed. Its deadline stands. A request that has found another life already is left alone.
        UnknownRequest when there is neither letter nor request, or when the request is gone and a
        later one has its id: then that one and the letter stay as they are.
        """
        call = requeue_call(self.keys, letter, keep_tokens=keep_tokens)
        state = self._scripts.run("requeue", call)
        if not state:
            raise UnknownRequest(letter.request_id, "no such dead letter")
        if state == b"superseded":
            told = f"the request of the letter {letter.entry_id} is gone, a later one has its id"
            raise UnknownRequest(letter.request_id, told)
        return State(state.decode())

    def pause(self, reason: str = "") -> None:
        """Lets no request of this shard be claimed from now on; what runs goes on.

        InvalidRequest for a reason that is no text.
        """
        key = self.keys.control
        try:
            told = reason[:MAX_REASON_LENGTH].encode()
        except UnicodeEncodeError:
            raise InvalidRequest("reason", "must be a text") from None
        self._change(lambda pipeline: pipeline.hset(key, "paused", told))

    def resume(self) -> None:
        """Ends a pause; harmless when there is none."""
        key = self.keys.control
        self._change(lambda pipeline: pipeline.hdel(key, "paused"))

    def pause_reason(self) -> str | None:
        """Why the shard is paused, None when it is not."""
        reason = self._read(command("hget", self.keys.control, "paused"))
        # Operators write it at the console, too, each in the encoding of a terminal.
        return None if reason is None else reason.decode(errors="replace")

    def drain(self, worker: str) -> None:
        """Asks a worker to end: it takes nothing new, and finishes or gives back what it has.

        It hears of it when it signs the registry next, within a lease. Harmless when repeated, and
        forgotten after a day if no worker of that name has heard it.
        """
        key, now = self.keys.control, self.now_ms()
        self._change(lambda pipeline: pipeline.hset(key, f"{_DRAIN}{worker}", now))

    def drain_wishes(self) -> frozenset[str]:
        """The workers that were asked to drain and have not said yet that they do."""
        names = self._read(command("hkeys", self.keys.control))
        wishes = (name.decode(errors="replace") for name in names)
        return frozenset(w.removeprefix(_DRAIN) for w in wishes if w.startswith(_DRAIN))

    def set_limits(self, limits: QueueLimits) -> None:
        """Replaces the limits of this shard; every SUBMIT of any client obeys them from now on."""
        key, wanted = self.keys.control, limit_fields(limits)
        before = self._read(command("hkeys", key))
        old = [name for name in before if name.startswith(b"max_")]

        def replace(pipeline: Any) -> None:
            if old:
                pipeline.hdel(key, *old)
            for name, limit in wanted.items():
                pipeline.hset(key, name, str(limit))

        self._change(replace)

    def limits(self) -> QueueLimits:
        """The limits of this shard."""
        return limits_of(self._read(command("hgetall", self.keys.control)))

    def backlog(self) -> Backlog:
        """What is before this shard, as its limits count it."""
        return backlog_of(self._read(command("hgetall", self.keys.counts)))

    def open_of(self, tenant: str) -> list[str]:
        """The ids of a tenant's requests that wait or run, sorted.

        Looks through the open requests of this shard a part at a time. One that comes or ends
        meanwhile may be in the answer or not.
        """
        found: set[str] = set()
        cursor = 0
        while True:
            look = command("hscan", self.keys.open, cursor, count=OPEN_PER_LOOK)
            cursor, fields = self._read(look)
            # A tenant has no spaces in it, so it is what stands behind the last one.
            found |= {
                request_id.decode()
                for request_id, value in fields.items()
                if value.rpartition(b" ")[2].decode() == tenant
            }
            if cursor == 0:
                return sorted(found)

    def queue_depth(self) -> dict[Priority, int]:
        """Entries in the ingress streams of each class: waiting, or delivered and not yet claimed.

        What came back and what is new together.
        """
        found = self._read(*(command("xlen", stream) for stream in self.keys.all_ingress))
        new, resumed = found[: len(Priority)], found[len(Priority) :]
        return dict(zip(Priority, map(sum, zip(new, resumed, strict=True)), strict=True))

    def num_scheduled(self) -> int:
        """Requests that wait for a moment of their own, or for another attempt."""
        return int(self._read(command("zcard", self.keys.delay)))

    def num_expired_leases(self) -> int:
        """Requests whose worker is gone, or cut off, and which no other has taken over yet."""
        return int(self._read(command("zcount", self.keys.lease, "-inf", self.now_ms())))

    def num_unheard(self, since_ms: int) -> int:
        """Requests of whose worker nothing was heard since a moment on the broker's clock.

        It was given them before that, and has not renewed their leases or claimed them since. It
        may yet do so, at most a lease after that moment; else they can be taken over.
        """
        keys, idle_ms = self.keys, max(0, self.now_ms() - since_ms)
        renewed = since_ms + int(self.lease_seconds * 1000)
        delivered = (
            command("xpending_range", stream, GROUP, "-", "+", count=MAX_PENDING_SEEN)
            for stream in keys.all_ingress
        )
        num_leases, *streams = self._read(
            command("zcount", keys.lease, "-inf", renewed), *delivered
        )
        silences = [int(row["time_since_delivered"]) for rows in streams for row in rows]
        return int(num_leases) + sum(silence >= idle_ms for silence in silences)

    def workers(self) -> list[WorkerInfo]:
        """The last word of every worker heard within a day, sorted by name."""
        return self._run(reading.workers(self.keys))

    def absence(self) -> str | None:
        """Why a request of this shard may be waiting for nothing, as a clause; None if it is not.

        No worker is alive, workers serve another number of shards, or the shard is paused. One
        round trip. None where this user may not look.
        """
        return self._run(absence(self.keys))

    def _change(self, write: Callable[[Any], object]) -> None:
        """Changes what operators set, in one step.

        Always as a transaction: that is what tells operators from others in Redis' access lists.
        """

        def once() -> None:
            with self._connection.pipeline(transaction=True) as pipeline:
                write(pipeline)
                pipeline.execute()

        self._retrying(once)
