-- HEARTBEAT: renew the leases that are still held.
--
-- KEYS  1 lease, then per claim record, body, output
-- ARGV  per claim: id, epoch, owner
-- Returns per claim {1 when it is held, cancel flag}.

local lease = KEYS[1]
local now = now_ms()

local replies = {}
for index = 0, (#KEYS - 1) / 3 - 1 do
  local keys, at = keys_at(2 + 3 * index), FIRST + 3 * index
  local record = fields_of(keys, 'state', 'epoch', 'owner', 'cancel')
  local held = holds(record, ARGV[at + 1], ARGV[at + 2])
  if held then
    redis.call('ZADD', lease, int(now + LEASE_MS), ARGV[at])
    keep(keys, keys.record)
  end
  replies[index + 1] = { held and 1 or 0, record.cancel == '1' and 1 or 0 }
end
return replies
