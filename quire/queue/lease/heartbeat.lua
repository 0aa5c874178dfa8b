-- HEARTBEAT: renew the leases that are still held.
--
-- KEYS  those of running.lua with one request per claim
-- ARGV  per claim: id, epoch, owner
-- Returns per claim {1 when it is held, cancel flag}.

local now = now_ms()

local replies = {}
for at = FIRST, #ARGV, 3 do
  local id, keys = ARGV[at], take_keys(ARGV[at])
  local record = record_of(keys)
  local held = holds(record, ARGV[at + 1], ARGV[at + 2])
  if held then
    redis.call('ZADD', LEASE, int(now + LEASE_MS), id)
    keep(keys, keys.record)
  end
  replies[#replies + 1] = { held and 1 or 0, record.cancel == '1' and 1 or 0 }
end
return replies
