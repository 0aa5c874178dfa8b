-- CANCEL: end a request that waits, flag a running one, leave a terminal one alone.
--
-- KEYS  those of request.lua with one request
-- ARGV  id
-- Returns the state after this, or '' for an unknown request. The ticket of a queued request is left
-- for a worker to use up: deleting what is undelivered would make the group's lag unknown.

local id = ARGV[FIRST]
local keys = take_keys(id)
local record = record_of(keys)

if WAITS[record.state] then
  redis.call('ZREM', DELAY, id)
  return end_without_worker(keys, id, record.epoch, ENDINGS.cancelled, now_ms())
elseif record.state == 'running' then
  redis.call('HSET', keys.record, 'cancel', '1')
  -- Without its log position the next tokens go through COMMIT, whose reply has the flag.
  agree(keys, record)
  redis.call('HDEL', LOG_POSITIONS, id)
end
return record.state or ''
