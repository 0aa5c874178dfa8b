"""What workers, operators and observers read of one shard."""

from __future__ import annotations

from quire.queue.control.control import Control
from quire.queue.control.limits import Backlog, backlog_of
from quire.queue.shard import Shard
from quire.transport.procedure import command
from quire.wire.protocol import Priority

#: About how many open requests one read of `open_of` examines.
OPEN_PER_LOOK = 1000


class Counting(Shard):
    """Reads what workers and observers have to know."""

    def pause_reason(self) -> str | None:
        """The reason of the pause; None if the shard is not paused."""
        reason = self._read(command("hget", self.keys.control, "paused"))
        return None if reason is None else Control({b"paused": reason}).pause_reason

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


class Watching(Counting):
    """Reads what observers have to know."""

    def control(self) -> Control:
        """What operators and workers have set for this shard, in one round trip."""
        return Control(self._read(command("hgetall", self.keys.control)))

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
