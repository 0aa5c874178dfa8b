"""The operator's side of the broker: dead letters, pauses, limits, counts and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import InvalidRequest, UnknownRequest
from quire.queue import reading
from quire.queue.absence import absence
from quire.queue.calls import requeue_call
from quire.queue.control.control import DRAIN, Control
from quire.queue.control.defaults import FIELDS, QueueDefaults, default_fields
from quire.queue.rank.fairness import Fairness
from quire.queue.replies import (
    backlog_of,
    dead_letter_of,
    fairness_fields,
    limit_fields,
    readable,
)
from quire.queue.shard import Shard
from quire.queue.values import (
    Backlog,
    DeadLetter,
    QueueLimits,
)
from quire.queue.workers.workers import WorkerInfo
from quire.transport.procedure import command
from quire.wire.output import State
from quire.wire.protocol import Priority

#: The longest reason of a pause, in characters.
MAX_REASON_LENGTH = 500

#: About how many open requests one read of `open_of` examines.
OPEN_PER_LOOK = 1000


class Operating(Shard):
    """The operator's side of a Broker."""

    def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        """The newest dead letters, newest first, without unreadable ones."""
        rows = self._read(command("xrevrange", self.keys.dead, count=count))
        return readable(dead_letter_of, rows)

    def purge(self, entry_ids: Sequence[str]) -> int:
        """Deletes dead letters; returns how many there were. Their requests stay ended."""
        if not entry_ids:
            return 0
        return int(self._read(command("xdel", self.keys.dead, *entry_ids)))

    def requeue(self, letter: DeadLetter, *, keep_tokens: bool) -> State:
        """Queues the request of a dead letter again under its id; returns its state after that.

        It is `queued` with all its attempts, and the letter is deleted. With `keep_tokens` the
        request continues after its published tokens, unless its retention has passed; otherwise
        they are dropped. Its deadline does not change. A request that was requeued before does not
        change. UnknownRequest if neither letter nor request exists. UnknownRequest also if the
        request is gone and a later one has its id: then this request and the letter do not change.
        """
        call = requeue_call(self.keys, letter, keep_tokens=keep_tokens)
        state = self._scripts.run("requeue", call)
        if not state:
            raise UnknownRequest(letter.request_id, "no such dead letter")
        if state == b"superseded":
            message = f"the request of the letter {letter.entry_id} is gone, a later one has its id"
            raise UnknownRequest(letter.request_id, message)
        return State(state.decode())

    def pause(self, reason: str = "") -> None:
        """From now on no request of this shard can be claimed. Running requests continue.

        InvalidRequest if the reason cannot be encoded as UTF-8.
        """
        key = self.keys.control
        try:
            stored = reason[:MAX_REASON_LENGTH].encode()
        except UnicodeEncodeError:
            raise InvalidRequest("reason", "must be a text") from None
        self._change(lambda pipeline: pipeline.hset(key, "paused", stored))

    def resume(self) -> None:
        """Ends a pause; does nothing if there is none."""
        key = self.keys.control
        self._change(lambda pipeline: pipeline.hdel(key, "paused"))

    def pause_reason(self) -> str | None:
        """The reason of the pause; None if the shard is not paused."""
        reason = self._read(command("hget", self.keys.control, "paused"))
        return None if reason is None else Control({b"paused": reason}).pause_reason

    def drain(self, worker: str) -> None:
        """Asks a worker to end: it claims nothing new, and finishes or releases its requests.

        The worker reads this when it next signs the registry, within a lease. May be repeated. It
        expires after a day if no worker of that name has read it.
        """
        key, now = self.keys.control, self.now_ms()
        self._change(lambda pipeline: pipeline.hset(key, f"{DRAIN}{worker}", now))

    def control(self) -> Control:
        """What operators and workers have set for this shard, in one round trip."""
        return Control(self._read(command("hgetall", self.keys.control)))

    def set_limits(self, limits: QueueLimits) -> None:
        """Replaces the limits of this shard; from now on they apply to every SUBMIT."""
        key, wanted = self.keys.control, limit_fields(limits)
        before = self._read(command("hkeys", key))
        old = [name for name in before if name.startswith(b"max_")]

        def replace(pipeline: Any) -> None:
            if old:
                pipeline.hdel(key, *old)
            for name, limit in wanted.items():
                pipeline.hset(key, name, str(limit))

        self._change(replace)

    def set_defaults(self, defaults: QueueDefaults) -> None:
        """Replaces what this shard sets for requests that are submitted from now on."""
        key, wanted = self.keys.control, default_fields(defaults)

        def replace(pipeline: Any) -> None:
            pipeline.hdel(key, *FIELDS)
            for name, value in wanted.items():
                pipeline.hset(key, name, value)

        self._change(replace)

    def set_fairness(self, fairness: Fairness) -> None:
        """Replaces how the tenants of this shard share it, for requests from now on.

        When fairness ends, the requests that wait are ranked anew by `restore`, some at a time.
        """
        key, wanted = self.keys.control, fairness_fields(fairness)
        before = self._read(command("hkeys", key))
        old = [name for name in before if name == b"fairness" or name.startswith(b"weight:")]

        def replace(pipeline: Any) -> None:
            if old:
                pipeline.hdel(key, *old)
            if wanted:
                pipeline.hset(key, mapping=wanted)
            pipeline.delete(self.keys.survey)

        self._change(replace)

    def backlog(self) -> Backlog:
        """The backlog of this shard, as its limits count it."""
        return backlog_of(self._read(command("hgetall", self.keys.counts)))

    def open_of(self, tenant: str) -> list[str]:
        """The ids of a tenant's requests that wait or run, sorted.

        Reads all open requests of this shard, in parts. A request that is submitted or ends
        meanwhile may be in the result or not.
        """
        found: set[str] = set()
        cursor = 0
        while True:
            look = command("hscan", self.keys.open, cursor, count=OPEN_PER_LOOK)
            cursor, fields = self._read(look)
            # A tenant contains no space, so it is the text after the last one.
            found |= {
                request_id.decode()
                for request_id, value in fields.items()
                if value.rpartition(b" ")[2].decode() == tenant
            }
            if cursor == 0:
                return sorted(found)

    def queue_depth(self) -> dict[Priority, int]:
        """How many requests of each class wait for a worker."""
        sizes = self._read(*(command("zcard", ranks) for ranks in self.keys.all_ranks))
        return dict(zip(Priority, sizes, strict=True))

    def num_scheduled(self) -> int:
        """The number of scheduled requests: with a time of their own, or between two attempts."""
        return int(self._read(command("zcard", self.keys.delay)))

    def num_expired_leases(self) -> int:
        """The number of requests whose lease has expired and which are not taken over yet."""
        return int(self._read(command("zcount", self.keys.lease, "-inf", self.now_ms())))

    def num_unheard(self, since_ms: int) -> int:
        """The number of requests whose worker has been silent since a time on the broker's clock.

        It has not renewed their leases since. One lease after that time they can be taken over.
        """
        renewed = since_ms + int(self.lease_seconds * 1000)
        return int(self._read(command("zcount", self.keys.lease, "-inf", renewed)))

    def workers(self) -> list[WorkerInfo]:
        """The workers that have signed the registry within a day, sorted by name."""
        return self.run(reading.workers(self.keys))

    def absence(self) -> str | None:
        """Why no worker will take a request of this shard, as a clause; None if one may.

        No worker is alive, all drain, the workers serve another number of shards, or the shard is
        paused. Also None if this Redis user may not read the registry. One round trip.
        """
        return self.run(absence(self.keys))

    def _change(self, write: Callable[[Any], object]) -> None:
        """Changes the settings of operators atomically.

        Always in a transaction, because the access lists of Redis allow MULTI only to operators.
        """

        def once() -> None:
            with self.connection.pipeline(transaction=True) as pipeline:
                write(pipeline)
                pipeline.execute()

        self._retrying(once)
