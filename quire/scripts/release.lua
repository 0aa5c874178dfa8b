-- RELEASE: a worker gives claims back; the attempts do not count.
--
-- KEYS  1 lease, 2 dead, 3..6 ingress by priority, then per claim record, body, output
-- ARGV  per claim: id, epoch, owner
-- Returns per claim 1 when it was given back by this call or an earlier one of the same claim.

local lease, dead = KEYS[1], KEYS[2]
local now = now_ms()

local replies = {}
for index = 0, (#KEYS - 6) / 3 - 1 do
  local keys, at = keys_at(7 + 3 * index), FIRST + 3 * index
  local owner = ARGV[at + 2]
  local record = fields_of(keys, 'state', 'epoch', 'owner', 'attempts', 'priority', 'cancel',
    'deadline_ms', 'released')
  local released = record.released == owner
  if holds(record, ARGV[at + 1], owner) then
    redis.call('HSET', keys.record, 'released', owner)
    requeue(keys, ARGV[at], lease, dead, 3, record, tonumber(record.attempts) - 1, now)
    released = true
  end
  replies[index + 1] = released and 1 or 0
end
return replies
