-- EXPIRE: end the requests whose time is over and which no worker holds.
--
-- KEYS  those of request.lua, then lease, then the keys of every request
-- ARGV  per request: id. Each is looked at here, whatever the caller knows of it.
-- Returns per request its new state, '' when there was nothing to do. The ticket of a queued request
-- is left, as CANCEL leaves it.

local LEASE = KEYS[next_key]
next_key = next_key + 1
local now = now_ms()

local function is_over(times, id)
  local moment = redis.call('ZSCORE', times, id)
  return moment and tonumber(moment) <= now
end

-- The ending that is due, or nil. A running request whose lease is over would be queued again by
-- REAP, or get the same ending there.
local function ending_of(id, record)
  local deadline = tonumber(record.deadline_ms or '0')
  local is_late = deadline > 0 and now >= deadline
  if WAITS[record.state] and is_over(WAIT, id) then
    return is_late and 'deadline' or 'queue_timeout'
  elseif record.state == 'running' and is_over(LEASE, id) then
    return record.cancel == '1' and 'cancelled' or is_late and 'deadline' or nil
  end
  return nil
end

local function expire(keys, id)
  local record = record_of(keys)
  if not WAITS[record.state] and is_over(WAIT, id) then
    redis.call('ZREM', WAIT, id)
    if not record.state then
      forget(keys, id)
    end
  end
  local ending = ending_of(id, record)
  if not ending then
    return ''
  end
  redis.call('ZREM', DELAY, id)
  redis.call('ZREM', LEASE, id)
  return end_without_worker(keys, id, record.epoch, ENDINGS[ending], now)
end

local replies = {}
for at = FIRST, #ARGV do
  replies[#replies + 1] = expire(take_keys(ARGV[at]), ARGV[at])
end
return replies
