-- EXPIRE: end the requests that have waited too long, without waiting for a worker to claim them.
--
-- KEYS  those of running.lua with every request
-- ARGV  per request: id. The caller read them from the wait set; each is looked at again here.
-- Returns per request its new state, '' when there was nothing to do. The ingress entry of a queued
-- request is left for CLAIM to drop, as CANCEL leaves it.

local now = now_ms()

local function expire(keys, id)
  local latest = redis.call('ZSCORE', WAIT, id)
  if not latest or tonumber(latest) > now then
    return ''
  end
  local record = fields_of(keys, 'state', 'epoch', 'deadline_ms')
  if not WAITS[record.state] then
    redis.call('ZREM', WAIT, id)
    if not record.state then
      forget(keys, id)
    end
    return ''
  end
  local deadline = tonumber(record.deadline_ms)
  local is_late = deadline > 0 and now >= deadline
  redis.call('ZREM', DELAY, id)
  local ending = ENDINGS[is_late and 'deadline' or 'queue_timeout']
  return end_without_worker(keys, id, record.epoch, ending, now)
end

local replies = {}
for at = FIRST, #ARGV do
  replies[#replies + 1] = expire(take_keys(ARGV[at]), ARGV[at])
end
return replies
