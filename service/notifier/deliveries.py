"""The webhooks of one shard that are still to be posted, kept in Redis until they are.

    hook:due       zset     `<tenant>:<webhook id>` -> when it is to be posted, or, while a notifier
                            posts it, until when that notifier has it; ms of Redis' clock
    hook:counts    hash     tenant -> number of its webhooks
    hook:<id>      hash     body, attempts, created_ms; expires some days after its creation
    hook:circuits           see circuits.py

They have the prefix of the shard's keys. A notifier that dies loses nothing: what it was posting is
due again after its lease.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from quire.keys import Keys
from quire.transport.concurrency_async import heeding_cancels
from quire.transport.slots import for_key
from service.notifier.circuits import FAILURES, Circuits
from service.notifier.events import Event

#: How long the keys of a webhook live in addition to the time for which it is tried.
RESERVE_MS = 86_400_000

# KEYS due, counts, webhook; ARGV member of due, tenant, body, created_ms, most of a tenant, life in
# ms. Returns 1; 0 if the tenant has too many already. A webhook that waits already stays as it is.
_ADD = """
if redis.call('EXISTS', KEYS[3]) == 1 then
  return 1
end
if tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0') >= tonumber(ARGV[5]) then
  return 0
end
redis.call('HSET', KEYS[3], 'body', ARGV[3], 'created_ms', ARGV[4], 'attempts', '0')
redis.call('PEXPIRE', KEYS[3], ARGV[6])
if redis.call('ZADD', KEYS[1], 0, ARGV[1]) == 1 then
  redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
end
return 1
"""

# KEYS due, circuits; ARGV lease in ms, count, FAILURES. Leases what is due to the caller. Returns
# the time, what is leased, how many are due beside these, how many wait, and the open circuits.
_TAKE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
for _, id in ipairs(ids) do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[1])), id)
end
local due = redis.call('ZCOUNT', KEYS[1], '-inf', now)
local open = redis.call('ZCOUNT', KEYS[2], ARGV[3], '+inf')
return { string.format('%.0f', now), ids, due, redis.call('ZCARD', KEYS[1]), open }
"""

# KEYS due, webhook; ARGV member of due, pause in ms, attempts to add. One that was posted meanwhile
# stays gone.
_DEFER = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return 0
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
if ARGV[3] ~= '0' and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HINCRBY', KEYS[2], 'attempts', ARGV[3])
end
return 1
"""

# KEYS due, counts, webhook, circuits; ARGV member of due, tenant
_FORGET = """
redis.call('DEL', KEYS[3])
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1
  and redis.call('HINCRBY', KEYS[2], ARGV[2], -1) <= 0 then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('ZREM', KEYS[4], ARGV[2])
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Pending:
    """A webhook that is due, leased to this process."""

    webhook_id: str
    tenant: str
    body: str
    attempts: int
    age_seconds: float

    @property
    def member(self) -> str:
        """The member of `hook:due`."""
        return member_of(self.tenant, self.webhook_id)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one look has leased, the webhooks that are due beside it, and all that wait."""

    pending: Sequence[Pending] = ()
    num_due: int = 0
    num: int = 0


class Deliveries:
    """The webhooks of one shard. All methods may raise RedisError, and may be repeated."""

    def __init__(
        self, connection: redis.asyncio.Redis, keys: Keys, *, most_per_tenant: int, life_ms: int
    ) -> None:
        connection = for_key(connection, keys.prefix)
        self._connection = connection
        self._prefix = f"{keys.prefix}:hook:"
        self._due, self._counts = f"{self._prefix}due", f"{self._prefix}counts"
        self.circuits = Circuits(connection, key=f"{self._prefix}circuits", due=self._due)
        self._most = most_per_tenant
        self._life_ms = life_ms + RESERVE_MS
        self._add = connection.register_script(_ADD)
        self._take = connection.register_script(_TAKE)
        self._defer = connection.register_script(_DEFER)
        self._forget = connection.register_script(_FORGET)

    async def add(self, event: Event) -> bool:
        """Keeps a webhook, due at once. False if its tenant has too many already."""
        keys = [self._due, self._counts, self._prefix + event.webhook_id]
        member = member_of(event.tenant, event.webhook_id)
        arguments: list[Any] = [member, event.tenant, event.body, event.created_ms]
        adding = self._add(keys, [*arguments, self._most, self._life_ms])
        return bool(await heeding_cancels(adding))

    async def take(self, *, count: int, lease_seconds: float) -> Taken:
        """Leases webhooks that are due, the oldest first."""
        keys, arguments = [self._due, self.circuits.key], [int(lease_seconds * 1000), count]
        taking = self._take(keys, [*arguments, FAILURES])
        now, members, due, num, self.circuits.num_open = await heeding_cancels(taking)
        found = []
        for member in members:
            tenant, _, webhook_id = member.decode().partition(":")
            reading: Any = self._connection.hgetall(self._prefix + webhook_id)
            fields = await heeding_cancels(reading)
            if b"body" not in fields:
                # The webhook's key has expired: nobody tried it for days.
                await self.forget(tenant, webhook_id)
                continue
            age_seconds = (int(now) - int(fields[b"created_ms"])) / 1000
            attempts, body = int(fields.get(b"attempts", 0)), fields[b"body"].decode()
            found.append(Pending(webhook_id, tenant, body, attempts, age_seconds))
        return Taken(found, int(due), int(num))

    async def defer(self, pending: Pending, *, seconds: float, was_tried: bool) -> None:
        """Makes a webhook due after a pause."""
        keys = [self._due, self._prefix + pending.webhook_id]
        deferring = self._defer(keys, [pending.member, int(seconds * 1000), int(was_tried)])
        await heeding_cancels(deferring)

    async def forget(self, tenant: str, webhook_id: str) -> None:
        """Removes a webhook: it was posted, or is given up."""
        keys = [self._due, self._counts, self._prefix + webhook_id, self.circuits.key]
        await heeding_cancels(self._forget(keys, [member_of(tenant, webhook_id), tenant]))


def member_of(tenant: str, webhook_id: str) -> str:
    """The member of `hook:due`. A tenant has no colon."""
    return f"{tenant}:{webhook_id}"
