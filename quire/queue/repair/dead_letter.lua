-- DEAD LETTER: end a claimed request that can never run, and keep its bytes for a person.
--
-- KEYS  those of running.lua with one request
-- ARGV  id, epoch, owner, reason, terminal record
-- Returns 1 when this claim ended the request, now or in an earlier call; 0 when it is fenced.

local id, epoch, owner = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local keys = take_keys(id)
local record = record_of(keys)

if not holds(record, epoch, owner) then
  return record.state and record.epoch == epoch and record.owner == owner and 1 or 0
end
local now = now_ms()
bury(keys, id, ARGV[FIRST + 3], now)
redis.call('ZREM', LEASE, id)
write_end(keys, id, epoch, 'failed', ARGV[FIRST + 4], now)
return 1
