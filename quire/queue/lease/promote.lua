-- PROMOTE: queue the scheduled requests that are due.
--
-- KEYS  those of running.lua with every request
-- ARGV  per request: id. The caller read them from the delay set; each is looked at again here.
-- Returns per request its new state, '' when there was nothing to do.

local now = now_ms()

local function promote(keys, id)
  local due = redis.call('ZSCORE', DELAY, id)
  if not due or tonumber(due) > now then
    return ''
  end
  redis.call('ZREM', DELAY, id)
  local record = record_of(keys)
  if not record.state then
    forget(keys, id)
  end
  if record.state ~= 'scheduled' then
    return ''
  end
  local reason = ending_due(record, tonumber(record.attempts), now)
  if reason then
    return end_for(reason, keys, id, record, now)
  end
  return enqueue(keys, id, record, keeps_arrival(record), now)
end

local replies = {}
for at = FIRST, #ARGV do
  replies[#replies + 1] = promote(take_keys(ARGV[at]), ARGV[at])
end
return replies
