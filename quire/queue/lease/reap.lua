-- REAP: take requests from workers that let their lease expire.
--
-- KEYS  those of running.lua with every request
-- ARGV  per request: id. The caller read them from the lease set; each is looked at again here.
-- Returns per request its new state, '' when there was nothing to do.

local now = now_ms()

local function reap(keys, id)
  local expiry = redis.call('ZSCORE', LEASE, id)
  if not expiry or tonumber(expiry) > now then
    return ''
  end
  local record = record_of(keys)
  if record.state ~= 'running' then
    -- A lease without a running request (its keys are gone) guards nothing, nor does its log
    -- position.
    redis.call('ZREM', LEASE, id)
    redis.call('HDEL', LOG_POSITIONS, id)
    if not record.state then
      forget(keys, id)
    end
    return ''
  end
  agree(keys, record)
  record.losses = int(losses_of(record))
  redis.call('HSET', keys.record, 'losses', record.losses)
  return put_back(keys, id, record, attempts_of(record), keeps_arrival(record), now)
end

local replies = {}
for at = FIRST, #ARGV do
  replies[#replies + 1] = reap(take_keys(ARGV[at]), ARGV[at])
end
return replies
