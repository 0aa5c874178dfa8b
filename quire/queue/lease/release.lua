-- RELEASE: a worker gives claims back; the attempts do not count.
--
-- KEYS  those of running.lua with one request per claim
-- ARGV  per claim: id, epoch, owner
-- Returns per claim 1 when it was given back by this call or an earlier one of the same claim.

local now = now_ms()

local replies = {}
for at = FIRST, #ARGV, 3 do
  local id, owner, keys = ARGV[at], ARGV[at + 2], take_keys(ARGV[at])
  local record = record_of(keys)
  local released = record.released == owner
  if holds(record, ARGV[at + 1], owner) then
    redis.call('HSET', keys.record, 'released', owner)
    agree(keys, record)
    put_back(keys, id, record, tonumber(record.attempts) - 1, true, now)
    released = true
  end
  replies[#replies + 1] = released and 1 or 0
end
return replies
