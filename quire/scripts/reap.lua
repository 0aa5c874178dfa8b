-- REAP: take requests from workers that let their lease expire.
--
-- KEYS  1 lease, 2 dead, 3..6 ingress by priority, then per request record, body, output
-- ARGV  per request: id. The caller read them from the lease set; each is looked at again here.
-- Returns per request its new state, '' when there was nothing to do.

local lease, dead = KEYS[1], KEYS[2]
local now = now_ms()

local function reap(keys, id)
  local expiry = redis.call('ZSCORE', lease, id)
  if not expiry or tonumber(expiry) > now then
    return ''
  end
  local record = fields_of(keys, 'state', 'epoch', 'attempts', 'priority', 'cancel', 'deadline_ms')
  if record.state ~= 'running' then
    -- A lease without a running request (its keys are gone) guards nothing.
    redis.call('ZREM', lease, id)
    return ''
  end
  return requeue(keys, id, lease, dead, 3, record, tonumber(record.attempts), now)
end

local replies = {}
for index = 0, (#KEYS - 6) / 3 - 1 do
  replies[index + 1] = reap(keys_at(7 + 3 * index), ARGV[FIRST + index])
end
return replies
