"""A circuit breaker per endpoint: an endpoint that fails again and again is left alone for a while.

    hook:circuits  zset     tenant -> how many failures in a row; from FAILURES on, when the next
                            attempt may be made, ms of Redis' clock

Each shard has its own, beside its webhooks. They are in Redis, so that every notifier knows when an
endpoint takes webhooks again. A tenant without webhooks has no entry. If one is lost, its circuit
is closed.
"""

from typing import Any

import redis.asyncio

from quire.transport.concurrency_async import heeding_cancels

#: So many failures in a row open a circuit.
FAILURES = 5

#: How long an open circuit lets nothing through; then one attempt decides.
OPEN_SECONDS = 60.0

#: The most webhooks that are due at once when a circuit closes; others wait for its next attempt.
MAX_WOKEN = 10_000

#: Of the webhooks that wait for a circuit, the one that has failed least often is tried first: it
#: may be one of them that the endpoint refuses. Each failure puts it off by a millisecond.
MAX_RANK = 1000

_NOW = """
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function at(ms)
  return string.format('%.0f', ms)
end
"""

# KEYS circuits, due; ARGV tenant, FAILURES, ms for which a circuit is open, member of due, rank of
# it. Returns whether an attempt may be made now. If not, the webhook is due with the next one.
_ENTER = f"""{_NOW}
local score = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0')
if score < tonumber(ARGV[2]) then
  return 1
end
local now = now_ms()
if score <= now then
  redis.call('ZADD', KEYS[1], at(now + tonumber(ARGV[3])), ARGV[1])
  return 1
end
redis.call('ZADD', KEYS[2], 'XX', at(score + tonumber(ARGV[5])), ARGV[4])
return 0
"""

# KEYS circuits; ARGV tenant, FAILURES, ms for which a circuit is open. Returns whether this failure
# has opened the circuit. One of an open circuit does not put off its next attempt.
_FAIL = f"""{_NOW}
local failures = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0') + 1
if failures > tonumber(ARGV[2]) then
  return 0
end
local opens = failures == tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], opens and at(now_ms() + tonumber(ARGV[3])) or failures, ARGV[1])
return opens and 1 or 0
"""

# KEYS circuits, due; ARGV tenant, FAILURES, MAX_WOKEN, MAX_RANK. What waits for an open circuit is
# due when it lets the next attempt through; nothing else of the tenant is.
_CLOSE = """
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
if not score or tonumber(score) < tonumber(ARGV[2]) then
  return 1
end
local prefix, last = ARGV[1] .. ':', string.format('%.0f', tonumber(score) + tonumber(ARGV[4]))
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], score, last, 'LIMIT', 0, ARGV[3])) do
  if string.sub(member, 1, #prefix) == prefix then
    redis.call('ZADD', KEYS[2], 0, member)
  end
end
return 1
"""


class Circuits:
    """The circuits of one shard, by tenant. All methods may raise RedisError, and be repeated.

    `due` is the key of the webhooks by time, see deliveries.py.
    """

    def __init__(self, connection: redis.asyncio.Redis, *, key: str, due: str) -> None:
        self.key = key
        #: How many are open, as of the last look at the webhooks.
        self.num_open = 0
        self._due = due
        self._enter = connection.register_script(_ENTER)
        self._fail = connection.register_script(_FAIL)
        self._close = connection.register_script(_CLOSE)

    async def enter(self, tenant: str, member: str, *, attempts: int) -> bool:
        """Whether an attempt may be made now; if not, this member of `due` waits for the next one.

        When the pause of an open circuit is over, the first caller may try.
        """
        arguments = [*_rule(tenant), member, min(attempts, MAX_RANK)]
        return bool(await heeding_cancels(self._enter([self.key, self._due], arguments)))

    async def fail(self, tenant: str) -> bool:
        """The endpoint has not taken a webhook. Returns whether this opened the circuit."""
        return bool(await heeding_cancels(self._fail([self.key], _rule(tenant))))

    async def close(self, tenant: str) -> None:
        """The endpoint has taken a webhook: all that wait for it are due."""
        limits = [FAILURES, MAX_WOKEN, MAX_RANK]
        await heeding_cancels(self._close([self.key, self._due], [tenant, *limits]))


def _rule(tenant: str) -> list[Any]:
    return [tenant, FAILURES, int(OPEN_SECONDS * 1000)]
